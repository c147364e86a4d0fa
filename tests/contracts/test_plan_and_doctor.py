"""`lockstep plan` and `lockstep doctor`, through the real command."""

import json
import signal
from pathlib import Path

import psutil
import pytest

from tests.commands import LOCKSTEP, call, descendants, run, started, wait_for

SMALL = ["model.width=4", "batch.global=64"]


def test_a_config_is_tried_predicted_and_checked(tmp_path: Path) -> None:
    finished = run(
        [*LOCKSTEP, "plan", "digits", *SMALL, "--steps", "6", "--measure", "1", "--try", "2", "--json"], tmp_path
    )
    assert finished.code == 0, finished.err
    found = json.loads(finished.out)
    assert found["lanes"] == 4
    assert found["knows_travel"] is True, "a run on two processes has measured communication"
    assert [each["processes"] for each in found["predictions"]] == [1, 2, 4]
    one, two, four = found["predictions"]
    assert one["speed_up"] == 1.0
    assert two["measured"] > 0
    assert abs(two["speed_up"] / two["measured"] - 1 - two["error"]) < 1e-9
    assert four["measured"] is None
    assert not any(tmp_path.iterdir()), "nothing is left behind"


@pytest.mark.slow
def test_stopping_a_plan_stops_its_trials_and_leaves_nothing(tmp_path: Path) -> None:
    command = [*LOCKSTEP, "plan", "digits", *SMALL, "--steps", "1000000", "--try", "2"]
    with started(command, tmp_path, {"TMPDIR": str(tmp_path)}) as process:
        wait_for(lambda: any(tmp_path.glob("lockstep-plan-*/2/ranks/1.jsonl")), 60, "two processes train")
        children = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert not [child for child in children if psutil.pid_exists(child.pid)], "no process is left"
    assert process.returncode == 128 + signal.SIGTERM
    assert not any(tmp_path.glob("lockstep-*"))


def test_an_error_is_one_line(tmp_path: Path) -> None:
    finished = call(["plan", "digits", "--try", "1,x"], tmp_path)
    message = "lockstep: --try 1,x: expected numbers of processes, at most 65536, as in 1,2,4\n"
    assert (finished.code, finished.err) == (2, message)


def test_the_doctor_lets_two_processes_communicate_and_lists_variables(tmp_path: Path) -> None:
    finished = run([*LOCKSTEP, "doctor", "-n", "2", "--json"], tmp_path, {"NCCL_DEBUG": "WARN", "MY_TOKEN": "secret"})
    assert finished.code == 0, finished.err
    found = json.loads(finished.out)
    assert found["fit"] is True
    assert found["ranks"]["backend"] == "gloo"
    assert len(found["ranks"]["together_s"]) == 2
    assert found["machine"]["variables"] == {"NCCL_DEBUG": "WARN"}
    assert "secret" not in finished.out
    assert {"level": "note", "words": "NCCL_DEBUG=WARN is set and will be respected"} in found["findings"]
    assert not any(tmp_path.iterdir())
