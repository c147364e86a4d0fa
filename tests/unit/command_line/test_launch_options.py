"""The option `-n` after the script: noticed where it can be meant for the launcher, and never refused."""

import pytest

from lockstep.command_line.launch_options import describe_misplaced_nproc


@pytest.mark.parametrize(
    "arguments",
    ["-n 2", "-n2", "-n auto", "-n 2:4", "--nproc-per-node 2", "--nproc-per-node=2", "--nproc_per_node=8"],
)
def test_a_number_of_processes_after_the_script_is_noticed(arguments: str) -> None:
    notice = describe_misplaced_nproc(["train.py", "--epochs", "3", *arguments.split(), "more"])
    assert notice is not None
    assert notice.startswith(f"{arguments} after train.py is an option of the script, and one process runs: ")
    assert notice.endswith(f"`lockstep run {arguments} train.py`")


def test_a_module_is_named_as_it_was_given() -> None:
    notice = describe_misplaced_nproc(["-m", "mine.train", "-n", "2"])
    assert notice is not None
    assert notice.endswith("`lockstep run -n 2 -m mine.train`")


@pytest.mark.parametrize("arguments", ["", "-n", "-n 1", "-n some", "-n 0.5", "--num 2", "2", "--name -2", "-nope"])
def test_other_arguments_are_the_scripts_own(arguments: str) -> None:
    assert describe_misplaced_nproc(["train.py", *arguments.split()]) is None
