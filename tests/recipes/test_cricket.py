"""The cricket recipe through the real command: it learns, the same on any number of processes and after a stop."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from lockstep.events.jsonl import read_jsonl
from lockstep.recipes.cricket.cricsheet import read_matches
from lockstep.recipes.cricket.match import NUM_OUTCOMES
from lockstep.recipes.cricket.synthetic import synthetic_contents
from tests.commands import LOCKSTEP, call, run
from tests.shared_data import shared_data

SMALL = (
    "model.width=32 model.depth=1 model.heads=2 data.memory=4 optim.lr=5e-3 schedule.warmup=5 "
    "epochs=6 evaluate_every=15 lanes=2 model.identity_dropout=0.2"
)


def write_archive(path: Path, count: int, **spoiled: Any) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, content in synthetic_contents(count):
            opened.writestr(f"{name}.json", json.dumps(content))
        for name, text in spoiled.items():
            opened.writestr(f"{name}.json", text)


def events_of(folder: Path) -> list[dict[str, Any]]:
    return list(read_jsonl(folder / "events.jsonl"))


def test_it_learns_the_same_on_one_and_two_processes_and_after_a_stop(tmp_path: Path) -> None:
    write_archive(tmp_path / "mine.zip", 60)
    train = [*LOCKSTEP, "train", "cricket", "data.path=mine.zip", *SMALL.split()]
    whole = run([*train, "--run", "whole"], tmp_path)
    assert whole.code == 0, whole.err
    end = events_of(tmp_path / "whole")[-1]
    metrics = end["metrics"]
    assert next(iter(metrics)) == "log_loss"
    assert metrics["log_loss"] < metrics["log_loss_table"] < metrics["log_loss_base"]
    assert metrics["improvement"] == pytest.approx(1 - metrics["log_loss"] / metrics["log_loss_table"])
    assert metrics["improvement"] > 0.01
    assert 0 < metrics["calibration_error"] < 0.05
    assert len(metrics["log_loss_by_outcome"]) == NUM_OUTCOMES
    (picture,) = (tmp_path / "whole" / "media").iterdir()
    assert picture.name == f"reliability-{end['step']}.png"

    # On two processes up to a step after an evaluation, then on one.
    stopped = run([*train, "--run", "parts", "-n", "2", "--stop-after", "19"], tmp_path)
    assert stopped.code == 75, stopped.err
    resumed = run([*train, "--run", "parts"], tmp_path)
    assert resumed.code == 0, resumed.err
    assert events_of(tmp_path / "parts")[-1]["digest"] == end["digest"]
    histories = [json.loads((tmp_path / name / "history.json").read_text()) for name in ("whole", "parts")]
    assert histories[0] == histories[1]
    assert len(histories[0]) >= 3


def test_a_damaged_match_is_one_line_that_names_it_and_leaves_nothing(tmp_path: Path) -> None:
    _, content = next(synthetic_contents(1))
    del content["innings"][0]["overs"][4]["deliveries"][2]["runs"]
    write_archive(tmp_path / "mine.zip", 3, spoiled=json.dumps(content))
    finished = call(["train", "cricket", "data.path=mine.zip", "--run", "here"], tmp_path)
    assert finished.code == 2
    (line,) = finished.err.splitlines()
    assert line == (
        "lockstep: data.path=mine.zip: spoiled.json: innings 1, over 4, delivery 3: "
        "runs: expected an object, but it is missing"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["mine.zip"]


@pytest.mark.slow
def test_the_real_archive_has_the_known_outcomes() -> None:
    matches = read_matches(str(shared_data("cricsheet_t20i_male_json.zip")))
    counts = [0] * NUM_OUTCOMES
    for match in matches:
        for innings in match.innings:
            for ball in innings.deliveries:
                counts[ball.outcome] += 1
    assert (len(matches), sum(counts)) == (3046, 687_335)
    assert [round(100 * count / sum(counts), 1) for count in counts] == [39.1, 34.1, 7.0, 0.5, 9.5, 4.2, 5.7]
