"""A name means one thing: no two modules, and no two public classes or functions, are called the same."""

import ast
from collections import defaultdict
from pathlib import Path

import lockstep

PACKAGE = Path(lockstep.__file__).parent

# `python -m` programs have a `main` each; every recipe has a `recipe.py`, which is how it is found.
SHARED_FUNCTIONS = {"main"}
SHARED_MODULES = {"__init__.py", "recipe.py"}


def test_no_two_modules_share_a_name() -> None:
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name not in SHARED_MODULES:
            places[path.name].append(str(path.relative_to(PACKAGE)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_no_two_public_classes_or_functions_share_a_name() -> None:
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            is_definition = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if is_definition and not node.name.startswith("_") and node.name not in SHARED_FUNCTIONS:
                places[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
