"""Imports point to the left only: a layer may import those before it in this list, and no others."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lockstep

PACKAGE = Path(lockstep.__file__).parent
ROOT = Path(__file__).parents[2]

ORDER = tuple(
    "terminal_text errors lazy_exports config events supervision launcher world data engine metrics "  # noqa: SIM905
    "checkpoint train search recipes observe loggers command_line report watch verify chaos plan settings doctor "
    "submit batch bench ckpt init cli".split()
)
READERS = {
    "terminal_text",
    "errors",
    "lazy_exports",
    "config",
    "events",
    "supervision",
}  # of the run folder: they can never disturb a run
# Layers beside the others rather than after them, and what they may import.
BESIDE = {
    "supervision": {"terminal_text", "errors", "config", "events"},
    "launcher": {"terminal_text", "errors", "config", "events", "supervision"},
    "observe": READERS,
    "loggers": READERS,
    "report": READERS | {"observe"},
    "watch": READERS | {"observe", "report"},
    "testing": set(ORDER[: ORDER.index("recipes")]),
    "__init__": set(ORDER),  # names the public API, lazily
    "__main__": {"cli", "supervision"},
}

# Public APIs, imported on first use: what else they name. `SearchPipeline` finds recipes; `console_for` is a logger.
NAMES_LAZILY = {"search/__init__.py": {"recipes"}, "loggers/__init__.py": {"observe"}}

# The environment is read in one file; the others are given what it says.
READS_ENVIRONMENT = "config/environment.py"

# Module-level values that are not state: they are set once, on import.
NOT_STATE = {"__all__", "app", "logger", "recipe"}


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).parts[0].removesuffix(".py"), path


def imported_layers(path: Path) -> set[str]:
    """Return the layers that a file imports, anywhere in it."""
    layers = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [node.module or ""]
            if node.module == "lockstep":
                names = [f"lockstep.{alias.name}" for alias in node.names if alias.name != "__version__"]
        layers |= {name.split(".")[1] for name in names if name.startswith("lockstep.")}
    return layers


@pytest.mark.parametrize(("layer", "path"), list(modules()), ids=lambda value: str(value).removeprefix(str(PACKAGE)))
def test_imports_point_to_the_left(layer: str, path: Path) -> None:
    allowed = BESIDE[layer] if layer in BESIDE else set(ORDER[: ORDER.index(layer)])
    allowed = allowed | NAMES_LAZILY.get(str(path.relative_to(PACKAGE)), set())
    assert imported_layers(path) - {layer} <= allowed


def test_every_folder_is_a_layer() -> None:
    assert {layer for layer, _ in modules()} == {*ORDER, *BESIDE}


def test_the_environment_is_read_in_one_file() -> None:
    readers = [str(p.relative_to(PACKAGE)) for _, p in modules() if {"environ", "getenv"} & _attributes(p)]
    assert readers == [READS_ENVIRONMENT]


def _attributes(path: Path) -> set[str]:
    """Return the attributes of `os` that a file uses."""
    return {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os"
    }


def test_modules_with_process_wide_state_are_listed() -> None:
    (section,) = re.findall(
        r"## Process-wide state\n(.*?)\n## ", (ROOT / "docs/architecture.md").read_text(), flags=re.DOTALL
    )
    listed = re.findall(r"^\| `([\w/]+\.py)` \|", section, flags=re.MULTILINE)
    assert listed == [str(path.relative_to(PACKAGE)) for _, path in modules() if _holds_state(path)]


def _holds_state(path: Path) -> bool:
    """Does the module have a variable of its own, in lower case, that is a container or what a call has returned?"""
    containers = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
    for node in ast.parse(path.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [target.id for target in targets if isinstance(target, ast.Name) and target.id.islower()]
        value = getattr(node, "value", None)
        is_found_in_library = isinstance(value, ast.Call) and re.match(r"getattr\(|_find_", ast.unparse(value))
        if set(names) - NOT_STATE and isinstance(value, (ast.Call, *containers)) and not is_found_in_library:
            return True
    return False


@pytest.mark.parametrize("name", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_the_documents_show_this_order(name: str) -> None:
    shown = " ".join((ROOT / name).read_text().split())
    assert f"`{' ← '.join(ORDER)}`" in shown
