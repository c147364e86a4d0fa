"""`lockstep plan` and `lockstep doctor`, through the real command."""

import json
from pathlib import Path

from tests.commands import LOCKSTEP, run

SMALL = ["model.width=4", "batch.global=64"]


def test_a_config_is_tried_predicted_and_scored_and_a_run_is_planned_from(tmp_path: Path) -> None:
    finished = run(
        [*LOCKSTEP, "plan", "digits", *SMALL, "--steps", "6", "--measure", "2", "--try", "1", "--json"], tmp_path
    )
    assert finished.code == 0, finished.err
    found = json.loads(finished.out)
    assert found["lanes"] == 4
    assert found["knows_travel"] is False, "one process alone was tried to predict from"
    assert [each["processes"] for each in found["predictions"]] == [1, 2, 4]
    one, two, four = found["predictions"]
    assert one["speed_up"] == 1.0
    assert two["measured"] > 0
    assert abs(two["speed_up"] / two["measured"] - 1 - two["error"]) < 1e-9
    assert four["measured"] is None
    assert not any(tmp_path.iterdir()), "nothing is left behind"

    trained = run([*LOCKSTEP, "train", "digits", *SMALL, "epochs=1", "--run", "here", "-n", "2", "--quiet"], tmp_path)
    assert trained.code == 0, trained.err
    planned = run([*LOCKSTEP, "plan", "here", "-n", "2,4"], tmp_path)
    assert planned.code == 0, planned.err
    lines = planned.out.splitlines()
    assert lines[0].split()[:2] == ["processes", "lanes"]
    assert [line.split()[0] for line in lines[1:3]] == ["2", "4"]
    assert "tells nothing of how long gradients travel" not in planned.out


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    for arguments, words in [
        (["digits", "--try", "1,x"], "--try 1,x: expected numbers of processes"),
        (["digits", "--try", "1,8"], "8 processes cannot share lanes=4"),
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
