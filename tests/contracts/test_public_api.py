"""What `import lockstep` offers, what that needs installed, and what it leaves unloaded."""

import subprocess
import sys

import pytest

import lockstep

COMMAND_LINE_ONLY = ("pydantic", "yaml", "typer", "rich", "sklearn")


def python(code: str) -> str:
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_names_are_sorted_and_all_there() -> None:
    assert lockstep.__all__ == sorted(lockstep.__all__)
    for name in lockstep.__all__:
        assert getattr(lockstep, name).__name__ == name
    assert set(lockstep.__all__) <= set(dir(lockstep))


def test_the_seeds_names_are_kept() -> None:
    promised = """
        Config Trainer World all_gather all_reduce barrier broadcast cleanup_distributed gather get_rank get_world_size
        init_process_group is_main_process launch load_checkpoint no_sync reduce_tensor scatter setup_distributed
    """
    assert set(promised.split()) <= set(lockstep.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = lockstep.no_such_name


def test_importing_lockstep_loads_nothing_heavy() -> None:
    loaded = python("import lockstep, sys; print(*sorted(sys.modules))").split()
    assert not {"torch", "numpy", *COMMAND_LINE_ONLY} & set(loaded)


def test_a_loop_of_ones_own_needs_no_command_line_library() -> None:
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
    loaded = python("import lockstep.launcher.start, lockstep.launcher.worker, sys; print(*sys.modules)").split()
    assert not {"torch", "numpy", *COMMAND_LINE_ONLY} & set(loaded)
