"""Private names of other libraries stay in the adapters that docs/architecture.md lists; nothing else uses any.

What the names mean is checked by the other `test_private_names_…`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lockstep

PACKAGE = Path(lockstep.__file__).parent
ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"

# In spite of their underscores these are documented: by Python, and a named tuple's.
DOCUMENTED = {"_thread", "_exit", "_fields", "_asdict", "_replace"}

# Nothing in them is used: whether torch's compiler was imported, and an annotation that only type checkers read.
ONLY_NAMED = {"torch._dynamo", "hashlib._Hash"}

PRIVATE = re.compile(r"_[A-Za-z]\w*")
DOTTED_NAME = re.compile(r"[A-Za-z]\w*(\.\w+)+")


def test_only_the_adapters_use_private_names() -> None:
    users = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if set(private_names(path.read_text())) - ONLY_NAMED
    }
    rows = re.findall(r"^\| private names of .*?\|(.*?)\|", ARCHITECTURE.read_text(), re.MULTILINE)
    assert users == set(re.findall(r"`([\w/]+\.py)`", "".join(rows)))


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("tensor._version", ["_version"]),
        ("super()._stop()", ["_stop"]),
        ("import torch._C", ["torch._C"]),
        ("from torch.distributed._utils import shape", ["torch.distributed._utils"]),
        ("from random import _inst as generator", ["_inst"]),
        ("getattr(random, '_inst', None)", ["_inst"]),
        ("MODULE = 'torch._C._distributed_c10d'", ["torch._C._distributed_c10d"]),
        ("'''It relies on torch._C.'''", []),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch._C import Store", []),
        ("class Own:\n    def __init__(self, other):\n        self._value = other._value", []),
        ("pair._replace(left=1)\nos._exit(0)\nmodule.__name__", []),
    ],
)
def test_private_names_are_found(code: str, names: list[str]) -> None:
    assert list(private_names(code)) == names


def private_names(source: str) -> Iterator[str]:
    """Yield the private names of other modules that a module uses. Its own are those that it sets on `self`."""
    tree = ast.parse(source)
    own = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_self(node.value)}
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if node not in for_types:
            yield from (name for name in _names_in(node) if _is_private(name) and name not in own)


def _names_in(node: ast.AST) -> list[str]:
    """Return the names by which a node refers to something of another module."""
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "", *(alias.name for alias in node.names)]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
        return [node.args[1].value] if isinstance(node.args[1], ast.Constant) else []
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and DOTTED_NAME.fullmatch(node.value):
        return [node.value]
    return []


def _is_private(name: str) -> bool:
    return any(PRIVATE.fullmatch(part) and part not in DOCUMENTED for part in name.split("."))


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")
