"""`lockstep plan` and `lockstep doctor`, through the real command."""

import json
import signal
from pathlib import Path

import psutil
import pytest

from lockstep.events.run_folder import FORMAT_VERSION
from tests.commands import LOCKSTEP, descendants, run, started, wait_for

SMALL = ["model.width=4", "batch.global=64"]


def test_a_config_is_tried_predicted_and_scored_and_a_run_is_planned_from(tmp_path: Path) -> None:
    finished = run(
        [*LOCKSTEP, "plan", "digits", *SMALL, "--steps", "6", "--measure", "1", "--try", "2", "--json"], tmp_path
    )
    assert finished.code == 0, finished.err
    found = json.loads(finished.out)
    assert found["lanes"] == 4
    assert found["knows_travel"] is True, "a run on two processes has told of it"
    assert [each["processes"] for each in found["predictions"]] == [1, 2, 4]
    one, two, four = found["predictions"]
    assert one["speed_up"] == 1.0
    assert two["measured"] > 0
    assert abs(two["speed_up"] / two["measured"] - 1 - two["error"]) < 1e-9
    assert four["measured"] is None
    assert not any(tmp_path.iterdir()), "nothing is left behind"

    times = {
        "data_s": 0,
        "compute_s": 0.4,
        "exchange_s": 0,
        "update_s": 0,
        "rest_s": 0,
        "saving_s": 0,
        "evaluating_s": 0,
    }
    line = {"kind": "step", "step": 10, "attempt": 1, "num_steps": 1, "num_lanes": 4, "elapsed_s": 1, **times}
    facts = {"run_id": "a", "format": FORMAT_VERSION, "fingerprint": {"lanes": 4}}
    (tmp_path / "here" / "ranks").mkdir(parents=True)
    (tmp_path / "here" / "ranks" / "0.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "here" / "run.json").write_text(json.dumps(facts))
    planned = run([*LOCKSTEP, "plan", "here", "-n", "2,4"], tmp_path)
    assert planned.code == 0, planned.err
    heading, *rows, warning, _, advice = planned.out.splitlines()
    assert heading.split()[:2] == ["processes", "lanes"]
    assert [row.split()[:6] for row in rows] == [
        ["2", "2", "200.0", "ms", "0%", "×2.00"],
        ["4", "1", "100.0", "ms", "0%", "×4.00"],
    ]
    assert warning == "These are at best: one process tells nothing of how long gradients travel."
    assert advice == "Worth it up to 4 processes, the most that were asked about."
    refused = run([*LOCKSTEP, "plan", "here", "-n", "8"], tmp_path)
    assert (refused.code, refused.err) == (2, "lockstep: -n 8: the run has lanes=4, and so at most 4 processes\n")
    for option in ("--try", "--measure", "--steps"):
        refused = run([*LOCKSTEP, "plan", "here", option, "4"], tmp_path)
        words = "lockstep: here is a run: settings, --try, --measure and --steps go with a config\n"
        assert (refused.code, refused.err) == (2, words)


@pytest.mark.slow
def test_stopped_in_the_middle_it_takes_everything_with_it(tmp_path: Path) -> None:
    command = [*LOCKSTEP, "plan", "digits", *SMALL, "--steps", "1000000", "--try", "2"]
    with started(command, tmp_path, {"TMPDIR": str(tmp_path)}) as process:
        wait_for(lambda: any(tmp_path.glob("lockstep-plan-*/2/ranks/1.jsonl")), 60, "two processes train")
        children = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert not [child for child in children if psutil.pid_exists(child.pid)], "at its end, nobody is left"
    assert process.returncode == 75
    assert not any(tmp_path.glob("lockstep-*"))


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    for arguments, words in [
        (["digits", "--try", "1,x"], "--try 1,x: expected numbers of processes"),
        (["digits", "--try", "1,8"], "8 processes cannot share lanes=4"),
        (["digits", "-n", "1,8"], "8 processes cannot share lanes=4"),
        (["digits", "-n", "none"], "-n none: expected numbers of processes"),
        (["nothing"], "neither a file nor a built-in recipe"),
        (["wing"], "is searched, not trained"),
    ]:
        finished = run([*LOCKSTEP, "plan", *arguments], tmp_path)
        assert finished.code == 2
        (line,) = finished.err.splitlines()
        assert words in line


def test_the_doctor_lets_two_processes_meet_and_tells_what_is_set(tmp_path: Path) -> None:
    finished = run([*LOCKSTEP, "doctor", "-n", "2", "--json"], tmp_path, {"NCCL_DEBUG": "WARN", "MY_TOKEN": "secret"})
    assert finished.code == 0, finished.err
    found = json.loads(finished.out)
    assert found["fit"] is True
    assert found["ranks"]["backend"] == "gloo"
    assert len(found["ranks"]["together_s"]) == 2
    assert found["machine"]["variables"] == {"NCCL_DEBUG": "WARN"}
    assert "secret" not in finished.out
    assert {"level": "note", "words": "NCCL_DEBUG=WARN is set and will be kept to"} in found["findings"]
    assert not any(tmp_path.iterdir())
