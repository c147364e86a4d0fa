"""Reading and checking what is asked of a scheduler."""

import pytest

from lockstep.errors import UserError
from lockstep.submit.job_request import (
    JobRequest,
    Machines,
    MemoryRequest,
    SubmittedCommand,
    check_grace,
    check_notice,
    check_setup,
    read_machines,
    read_memory,
    read_time,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90 * 60),
        ("1:30", 90),
        ("24:00:00", 86400),
        ("2-12", 60 * 3600),
        ("2-12:30", 60 * 3600 + 30 * 60),
        ("0-00:00:01", 1),
    ],
)
def test_times_are_read_in_slurms_formats(text: str, seconds: int) -> None:
    assert read_time(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "1h", "24:00:00:00", "-5", "1-", "1:-2", "00:00:00", "١", "1\n"])
def test_an_invalid_time_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--time .*expected hours:minutes:seconds"):
        read_time(text)


@pytest.mark.parametrize(("text", "memory"), [("64G", (64, "G")), ("512M", (512, "M")), ("1TiB", (1, "T"))])
def test_memory(text: str, memory: tuple[int, str]) -> None:
    assert read_memory(text) == memory


@pytest.mark.parametrize("text", ["", "64", "0G", "64K", "1.5G", "G", "-1G", "64G; rm"])
def test_an_invalid_memory_size_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--memory .*as in 64G"):
        read_memory(text)


def test_processes_and_cores_follow_the_gpus_unless_they_are_given() -> None:
    assert read_machines(2, None, None, None, None) == Machines(2, "1", 2, cpus=1)
    assert read_machines(2, None, 4, None, "8G") == Machines(2, "4", 8, cpus=4, gpus=4, memory=MemoryRequest(8, "G"))
    assert read_machines(3, "2:4", None, 16, None) == Machines(3, "2:4", 12, cpus=16)


@pytest.mark.parametrize("nproc", ["auto", "0", "-1", "two", "4:2", "0:2"])
def test_an_invalid_number_of_processes_is_refused(nproc: str) -> None:
    with pytest.raises(UserError, match="-n "):
        read_machines(1, nproc, None, None, None)


def test_there_is_time_to_save_and_to_train() -> None:
    check_notice(120, 121)
    check_notice(30)
    for notice, time in [(29, None), (0, None), (-5, None), (65536, None), (120, 120)]:
        with pytest.raises(UserError, match=f"--stop-before {notice}: "):
            check_notice(notice, time)


def test_the_commands_own_grace_must_fit() -> None:
    check_grace(None, 30)
    check_grace(105.0, 120)
    for grace in (105.5, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match=r"--grace .*expected 0 to 105"):
            check_grace(grace, 120)


def test_an_empty_setup_is_refused() -> None:
    check_setup(None)
    check_setup("module load cuda")
    for text in ("", "  ", "a\0b"):
        with pytest.raises(UserError, match="--setup"):
            check_setup(text)


def test_our_options_come_before_the_scripts_arguments() -> None:
    submitted = SubmittedCommand(("run", "-m", "mine", "--grace", "x"), "mine", None)
    job = JobRequest("mine", submitted, read_machines(2, "3", None, None, None), 120)
    ours = ["lockstep", "run", "-n", "3", "--nnodes", "2", "--grace", "105"]
    assert job.command_line("--nnodes", "2") == [*ours, "-m", "mine", "--grace", "x"]
    own = JobRequest("mine", submitted._replace(grace_s=9.0), job.machines, 120)
    assert own.command_line() == ["lockstep", "run", "-n", "3", "-m", "mine", "--grace", "x"]
