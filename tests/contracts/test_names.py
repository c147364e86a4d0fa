"""A name means one thing: no two modules share a name, and no two modules define the same public name."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import lockstep

PACKAGE = Path(lockstep.__file__).parent

# Every recipe has a `recipe.py`, which is how it is found.
SHARED_MODULES = {"__init__.py", "recipe.py"}

# A module of each of these kinds needs them: `python -m` programs, modules that log, groups of commands, recipes.
# And `lockstep run` is not `lockstep.Run`.
SHARED_NAMES = {"main", "logger", "app", "recipe", "config_class", "run"}

# What `lockstep init` writes: it becomes the user's script.
TEMPLATE = "init/script_template.py"


def test_no_two_modules_share_a_name() -> None:
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name not in SHARED_MODULES:
            places[path.name].append(str(path.relative_to(PACKAGE)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_no_two_modules_define_the_same_public_name() -> None:
    """Names that differ only in case or in underscores count as the same.

    Within a module they may: `run_status()` returns a `RunStatus`.
    """
    modules = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    del modules[TEMPLATE]
    assert shared_names(modules) == {}


@pytest.mark.parametrize("other", ["class Rule: ...", "Rule = int", "Rule: type = int", "RULE, other = 1, 2"])
@pytest.mark.parametrize("one", ["class Rule: ...", "def rule(): ...", "async def Rule(): ...", "rule = 1"])
def test_a_shared_name_is_found(one: str, other: str) -> None:
    assert shared_names({"a.py": one, "b.py": other}) == {"rule": ["a.py", "b.py"]}


def test_private_names_type_variables_and_pairs_in_one_module_are_allowed() -> None:
    every = "T = TypeVar('T')\n_rule = 1\nlogger = 2\n"
    assert shared_names({"a.py": every + "class Status: ...\ndef status(): ...", "b.py": every}) == {}


def shared_names(modules: dict[str, str]) -> dict[str, list[str]]:
    """Return the public names that several modules define, in lower case without underscores, and those modules."""
    places = defaultdict(list)
    for module, source in modules.items():
        for name in {name.replace("_", "").lower() for name in public_names(source)}:
            places[name].append(module)
    return {name: where for name, where in places.items() if len(where) > 1}


def public_names(source: str) -> Iterator[str]:
    """Yield the names of a module's own classes, functions, aliases and constants, without type variables."""
    for node in ast.parse(source).body:
        names = []
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not is_type_variable(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
        yield from (name for name in names if not name.startswith("_") and name not in SHARED_NAMES)


def is_type_variable(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) in ("TypeVar", "ParamSpec")
