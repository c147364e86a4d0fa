"""The ebm recipe through the real command: it learns, its curriculum resumes, and mistakes are errors of one line."""

from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.checkpoint_store import latest_checkpoint, load_weights
from lockstep.events.jsonl import read_jsonl
from tests.commands import LOCKSTEP, call, run

# A goal that is met early: the curriculum has grown before the run is stopped, and grows again after.
SMALL = (
    "model.width=8 batch.global=32 lanes=2 steps=72 evaluate_every=24 schedule.warmup=5 optim.lr=1e-2 "
    "attack.inside.radius=0.2 attack.inside.rate=0.1 attack.inside.steps=2 attack.evaluation_steps=4 "
    "weights.energy=0.5 average.decay=0.9 curriculum.auroc=0.5 curriculum.last=3 pictures.steps=3"
)


def train(folder: Path, name: str, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    finished = run([*LOCKSTEP, "train", "ebm", *arguments, "--run", name], folder, timeout_s=300)
    assert finished.code == code, finished.err
    return list(read_jsonl(folder / name / "events.jsonl"))


def evaluations(events: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    return {event["step"]: event["metrics"] for event in events if event["kind"] == "eval"}


def grown_steps(events: list[dict[str, Any]]) -> dict[int, int]:
    """Return the attack's number of steps, by the training step from which it holds."""
    return {event["step"]: event["disguise_steps"] for event in events if "disguise_steps" in event}


def test_it_learns_and_resumes_on_another_number_of_processes_with_its_curriculum(tmp_path: Path) -> None:
    whole = train(tmp_path, "whole", *SMALL.split())
    stopped = train(tmp_path, "cut", *SMALL.split(), "-n", "2", "--stop-after", "30", code=75)
    assert grown_steps(stopped) == {24: 2}, "the curriculum has grown before the stop"
    resumed = train(tmp_path, "cut", *SMALL.split())

    assert whole[-1]["digest"] == resumed[-1]["digest"]
    assert evaluations(whole) == evaluations(resumed), "the first of them on two processes, the others on one"
    assert grown_steps(whole) == grown_steps(resumed) == {24: 2, 48: 3}
    for picture in ("imagined-72.png", "disguised-72.png"):
        pictures = {(tmp_path / name / "media" / picture).read_bytes() for name in ("whole", "cut")}
        assert len(pictures) == 1

    losses = [event["loss"] for event in whole if "loss" in event]
    assert losses[-1] < 0.85 * losses[0]
    metrics = whole[-1]["metrics"]
    assert list(metrics)[:3] == ["accuracy", "robust_accuracy", "auroc"]
    assert metrics["auroc"] > 0.8
    assert metrics["accuracy"] > 0.25
    checkpoint = latest_checkpoint(tmp_path / "cut" / "checkpoints")
    assert checkpoint is not None
    assert load_weights(checkpoint, "average").keys() > load_weights(checkpoint).keys()


def test_missing_images_are_one_line_before_anything_is_written(tmp_path: Path) -> None:
    finished = call(["train", "ebm", "data.out_path=nowhere"], tmp_path)
    assert finished.code == 2
    (line,) = finished.err.splitlines()
    assert line.startswith("lockstep: data.out_path=nowhere: no such folder")
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_it_detects_outsiders_and_resists_attacks_where_a_plain_classifier_does_not(tmp_path: Path) -> None:
    strength = "attack.inside.radius=0.4 attack.inside.rate=0.15 attack.inside.steps=3 attack.evaluation_steps=10"
    longer = "steps=240 evaluate_every=60 curriculum.last=5"
    settings = [*SMALL.split(), *strength.split(), *longer.split(), "-n", "2"]
    joint = train(tmp_path, "joint", *settings)[-1]["metrics"]
    plain_events = train(tmp_path, "plain", *settings, "mode=plain")
    plain = plain_events[-1]["metrics"]
    assert not grown_steps(plain_events)
    assert joint["auroc"] > 0.9
    assert joint["auroc"] > plain["auroc"] + 0.05
    assert joint["auroc_attacked"] > plain["auroc_attacked"] + 0.1
    assert joint["robust_accuracy"] > plain["robust_accuracy"] + 0.1
    assert joint["accuracy"] > plain["accuracy"] - 0.1
    assert joint["energy"] < joint["energy_unseen"] - 1
