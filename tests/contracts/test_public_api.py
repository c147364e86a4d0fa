"""What `import lockstep` offers, what that needs installed, and what it leaves unloaded."""

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import lockstep

COMMAND_LINE_ONLY = ("pydantic", "yaml", "typer", "rich", "sklearn")


def python(code: str) -> str:
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.parametrize(
    "package", [lockstep, lockstep.loggers, lockstep.metrics, lockstep.search], ids=lambda p: p.__name__
)
def test_every_name_exists_and_is_documented(package: ModuleType) -> None:
    assert len(set(package.__all__)) == len(package.__all__)
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
        assert getattr(package, name).__doc__, f"{package.__name__}.{name} has no docstring"
    assert set(package.__all__) <= set(dir(package))


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
