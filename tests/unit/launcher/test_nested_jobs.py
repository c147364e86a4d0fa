"""Jobs inside a rank: where joining would wait forever, and how the error of a spawned process is shown."""

import pytest
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from lockstep.config import environment
from lockstep.errors import ConfigError, UserError, WorldError
from lockstep.launcher.nested_jobs import SpawnedFunction, error_of_child
from lockstep.world.process_group import setup_distributed

RANK = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "4000",
    "LOCKSTEP_STORE_PORT": "4000",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


@pytest.mark.parametrize(
    ("port", "changed", "waits"),
    [
        (None, {}, False),  # this job's store
        ("4000", {}, False),
        ("12355", {}, True),
        (None, {"MASTER_PORT": "12355"}, True),
        (None, {"MASTER_PORT": "12355", "TORCHELASTIC_USE_AGENT_STORE": "False"}, False),  # then its rank 0 hosts one
    ],
)
def test_a_port_where_no_process_hosts_a_store(port: str | None, changed: dict[str, str], waits: bool) -> None:
    with environment.temporary_variables(RANK | changed):
        assert environment.is_port_of_no_store(port) == waits


def test_outside_of_a_rank_every_port_is_good() -> None:
    assert not environment.is_port_of_no_store("12355")


def test_a_function_that_joins_no_job_is_called_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.distributed_c10d.rendezvous", lambda *_: pytest.fail("not called"))
    assert SpawnedFunction(divmod)(7, 2) == (3, 1)


def test_the_error_of_a_spawned_process() -> None:
    text = (
        "\n\n-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n"
        '  File "train.py", line 3, in work\n    join()\n    ^^^^^^\n{}\n'
    )
    named = error_of_child(ProcessRaisedException(text.format("lockstep.errors.WorldError: no store"), 1, 7))
    assert (type(named), str(named)) == (WorldError, "no store")
    several = error_of_child(
        ProcessRaisedException(text.format("lockstep.errors.ConfigError: a.yaml: x\n  b.yaml: y"), 1, 7)
    )
    assert isinstance(several, ConfigError)
    assert several.problems == ("a.yaml: x", "  b.yaml: y")
    for other in (
        ProcessRaisedException(
            text.format("lockstep.errors.UserError: x\n") + text.format("ValueError: lockstep.errors.UserError: x"),
            1,
            7,
        ),
        ProcessRaisedException(text.format("ValueError: x"), 1, 7),
        ProcessExitedException("exit", 1, 7, 3),
        UserError("lockstep.errors.WorldError: no store"),
    ):
        assert error_of_child(other) is other


def test_a_script_that_makes_another_job_inside_a_rank_is_refused() -> None:
    with environment.temporary_variables(RANK), pytest.raises(WorldError, match="rank=0 and world_size=3: this script"):
        setup_distributed(0, 3)
