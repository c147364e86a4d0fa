"""What `import lockstep` offers, what that needs installed, and what it leaves unloaded."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any

import pytest

import lockstep

PACKAGES = (lockstep, lockstep.loggers, lockstep.metrics, lockstep.search, lockstep.testing)

# Whose arguments are told elsewhere: the keys of configs in the guide's settings, and a `Step` is made by a run alone.
MADE_OTHERWISE = ("Config", "SearchConfig", "Step")

COMMAND_LINE_ONLY = ("pydantic", "yaml", "typer", "rich", "sklearn")


def python(code: str) -> str:
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.__name__)
def test_every_name_exists_and_is_documented(package: ModuleType) -> None:
    assert len(set(package.__all__)) == len(package.__all__)
    for name in package.__all__:
        if not isinstance(getattr(package, name), UnionType):  # an alias has neither; the reference describes it
            assert getattr(package, name).__name__ == name
            assert getattr(package, name).__doc__, f"{package.__name__}.{name} has no docstring"
    assert set(package.__all__) <= set(dir(package))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.__name__)
def test_methods_and_arguments_are_documented(package: ModuleType) -> None:
    undocumented = [
        f"{name}{'' if doc else ' has no docstring'}: {', '.join(missing)}"
        for name, signature, doc in callables(package)
        if (missing := [each for each in arguments(signature) if not re.search(rf"\b{each}\b", doc)]) or not doc
    ]
    assert undocumented == []


def callables(package: ModuleType) -> Iterator[tuple[str, Callable[..., Any] | None, str]]:
    """Yield the public functions, classes, methods and properties (as None), each with the text that describes it."""
    for name in package.__all__:
        thing = getattr(package, name)
        own_doc = inspect.getdoc(thing) or ""
        yield name, None if name in MADE_OTHERWISE else thing, own_doc
        for method_name, method in vars(thing).items() if inspect.isclass(thing) else ():
            if isinstance(method, classmethod | staticmethod):
                method = method.__func__
            if not method_name.startswith("_") and (inspect.isfunction(method) or isinstance(method, property)):
                doc = inspect.getdoc(method)
                is_function = inspect.isfunction(method)
                yield f"{name}.{method_name}", method if is_function else None, f"{doc}\n{own_doc}" if doc else ""


def arguments(function: Callable[..., Any] | None) -> list[str]:
    """Return the names that a docstring should explain: where there are several, and not of the kind `**kwargs`."""
    try:
        parameters = inspect.signature(function).parameters.values() if callable(function) else ()
    except ValueError:  # exceptions that take whatever `Exception` takes
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [each.name for each in parameters if each.kind not in variable and each.name not in ("self", "cls")]
    return names if len(names) > 1 else []


@pytest.mark.parametrize("package", [lockstep, lockstep.loggers, lockstep.search], ids=lambda p: p.__name__)
def test_an_unknown_name_is_an_attribute_error(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'no_such_name'"):
        _ = package.no_such_name


def test_type_checkers_see_what_is_exported() -> None:
    """Each package lists its names twice: for type checkers, as imports, and for Python, which imports them lazily."""
    for package in (lockstep, lockstep.loggers, lockstep.search):
        branch = next(node for node in ast.parse(Path(package.__file__).read_text()).body if isinstance(node, ast.If))
        imported = {alias.name for node in branch.body for alias in node.names}
        assert imported == set(dir(package))


def test_promised_names_exist() -> None:
    promised = """
        Config Trainer World all_gather all_reduce barrier broadcast cleanup_distributed gather get_rank get_world_size
        init_process_group is_main_process launch load_checkpoint no_sync reduce_tensor scatter setup_distributed
    """
    assert set(promised.split()) <= set(lockstep.__all__)


def test_importing_lockstep_loads_nothing_heavy() -> None:
    loaded = python("import lockstep, lockstep.loggers, lockstep.search, sys; print(*sorted(sys.modules))").split()
    assert not {"torch", "numpy", *COMMAND_LINE_ONLY} & set(loaded)


def test_a_custom_loop_needs_no_command_line_library() -> None:
    python(f"""
import sys
for name in {COMMAND_LINE_ONLY}:
    sys.modules[name] = None   # as if it were not installed
import lockstep, torch

def main(world):
    assert lockstep.all_reduce(torch.ones(1)).item() == world.size
    assert lockstep.broadcast_object({{"a": 1}}) == {{"a": 1}}

lockstep.launch(main)
""")


def test_launching_and_the_worker_module_load_no_torch() -> None:
    loaded = python(
        "import lockstep.launcher.launch_plan, lockstep.launcher.worker_main, sys; print(*sys.modules)"
    ).split()
    assert not {"torch", "numpy", *COMMAND_LINE_ONLY} & set(loaded)
