"""The vae recipe through the real command: it learns and draws, the same on any number of processes."""

import re
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import EXIT_STOPPED
from lockstep.events.jsonl import read_jsonl
from tests.commands import LOCKSTEP, Finished, call, run
from tests.shared_data import shared_data

SMALL = "model.width=8 model.latent=6 model.beta_warmup=60 steps=90 evaluate_every=45 optim.lr=5e-3 data.drawn=400"
PICTURES = ("reconstructions", "samples", "walks")


def train(folder: Path, *arguments: str, code: int = 0) -> Finished:
    finished = run([*LOCKSTEP, "train", "vae", *arguments, "--run", "here"], folder)
    assert finished.code == code, finished.err
    return finished


def events_in(folder: Path) -> list[dict[str, Any]]:
    return list(read_jsonl(folder / "here" / "events.jsonl"))


def pictures_in(folder: Path, step: int) -> dict[str, bytes]:
    return {name: (folder / "here" / "media" / f"{name}-{step}.png").read_bytes() for name in PICTURES}


def likeness_in(events: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    (found,) = [event["likeness"] for event in events if "likeness" in event]
    return found  # type: ignore[no-any-return]


def test_it_learns_and_draws_on_one_process_and_the_same_if_resumed_on_two(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    shown = train(whole, *SMALL.split()).out
    train(cut, *SMALL.split(), "--stop-after", "40", code=EXIT_STOPPED)  # while beta still rises
    train(cut, *SMALL.split(), "-n", "2")

    events, others = events_in(whole), events_in(cut)
    likeness = likeness_in(events)
    assert [event["processes"] for event in others if event["kind"] == "start"] == [1, 2]
    assert others[-1]["digest"] == events[-1]["digest"]
    assert others[-1]["metrics"] == events[-1]["metrics"]
    assert likeness_in(others) == likeness
    assert pictures_in(cut, 90) == pictures_in(whole, 90)

    first, last = [event["metrics"] for event in events if event["kind"] == "eval"]
    assert list(last) == ["nats", "reconstruction", "kl", "active_units", "bits_per_value"]
    assert last["nats"] < first["nats"]
    assert last["bits_per_value"] < 8, "what no model at all would need"
    assert last["kl"] > 1
    assert last["active_units"] >= 4
    assert likeness["drawn"]["precision"] > 0.5 > likeness["noise"]["precision"]
    assert likeness["real"]["coverage"] > likeness["drawn"]["coverage"] > 0.05 > likeness["noise"]["coverage"]
    assert f"drawn  {likeness['drawn']['precision']:9.3f}" in shown


def test_missing_images_are_one_line_before_anything_is_written(tmp_path: Path) -> None:
    finished = call(["train", "vae", "data.path=nowhere"], tmp_path)
    assert finished.code == 2
    assert re.fullmatch("lockstep: data.path=nowhere: .*\n", finished.err)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_a_quick_run_on_colour_images_in_bf16(tmp_path: Path) -> None:
    path = shared_data("cifar-10-batches-bin")
    settings = f"data.path={path} model.width=8 batch.global=16 model.likelihood=bernoulli precision=bf16 data.drawn=50"
    train(tmp_path, "--quick", *settings.split(), "-n", "2")
    end = events_in(tmp_path)[-1]
    assert end["step"] == 8
    assert list(end["metrics"]) == ["nats", "reconstruction", "kl", "active_units"]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures_in(tmp_path, 8).values())
