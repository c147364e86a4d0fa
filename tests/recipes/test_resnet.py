"""The resnet recipe through the real command: it learns, and the number of processes changes nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.events.jsonl import read_jsonl
from lockstep.events.run_folder import RunFolder
from lockstep.recipes.registry import load_recipe
from lockstep.train.train_job import train_recipe
from lockstep.world.world import World
from tests.commands import LOCKSTEP, run
from tests.shared_data import shared_data
from tests.sinks import RecordingSink
from tests.unit.recipes.image_files import write_cifar

SMALL = "steps=66 lanes=2 optim.lr=0.2 schedule.warmup=5 data.show=6 label_smoothing=0.05"


def train(folder: Path, name: str, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    finished = run([*LOCKSTEP, "train", "resnet", *SMALL.split(), *arguments, "--run", name], folder)
    assert finished.code == code, finished.err
    return list(read_jsonl(folder / name / "events.jsonl"))


def test_it_learns_on_two_processes_and_the_same_if_resumed_on_one(tmp_path: Path) -> None:
    whole = train(tmp_path, "whole", "-n", "2", "workers=1")
    assert list(whole[-1]["metrics"]) == ["accuracy", "top5", "loss"]
    assert whole[-1]["metrics"]["accuracy"] > 0.7
    losses = [event["loss"] for event in whole if event["kind"] == "step" and "loss" in event]
    assert losses[-1] < losses[0] / 2
    (words,) = [event["texts"]["guesses"] for event in whole if "texts" in event]
    assert words.count(",") == 5

    train(tmp_path, "cut", "-n", "2", "--stop-after", "40", code=75)
    resumed = train(tmp_path, "cut")
    assert [event["processes"] for event in resumed if event["kind"] == "start"] == [2, 1]
    assert resumed[-1]["digest"] == whole[-1]["digest"]
    assert resumed[-1]["metrics"] == whole[-1]["metrics"], "these on one process, those on two"
    pictures = {(tmp_path / name / "media" / "guesses-66.png").read_bytes() for name in ("whole", "cut")}
    assert len(pictures) == 1


def test_damaged_images_are_one_line_before_anything_is_written(tmp_path: Path) -> None:
    file = write_cifar(tmp_path / "images") / "data_batch_2.bin"
    file.write_bytes(file.read_bytes()[:-100])
    finished = run([*LOCKSTEP, "train", "resnet", "-n", "2", "data.path=images"], tmp_path)
    assert finished.code == 2
    (line,) = finished.err.splitlines()
    assert line == (
        "lockstep: images/data_batch_2.bin: record 19 (from 0) has 2,973 bytes instead of 3,073: "
        "the file is truncated or in another format"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["images"]


def test_the_users_own_images_at_another_size_through_resnet50(tmp_path: Path) -> None:
    overrides = (
        f"data.path={write_cifar(tmp_path / 'images', train=64)} data.flip=yes data.padding=4 data.image_size=40 "
        "data.show=0 model.variant=resnet50 model.width=4 batch.global=32 lanes=2 steps=2 schedule.warmup=0"
    )
    recipe, config = load_recipe("resnet", overrides.split())
    sink = RecordingSink()
    torch.set_num_threads(1)
    outcome = train_recipe(recipe, config, World(), RunFolder(tmp_path / "run"), [sink])  # type: ignore[arg-type]
    assert outcome.step == 2
    assert not (tmp_path / "run" / "media").exists()


@pytest.mark.slow
def test_it_learns_real_photographs(tmp_path: Path) -> None:
    photographs = shared_data("cifar-10-batches-bin")
    cifar10 = Path(__file__).parents[2] / "examples" / "cifar10.yaml"
    small = "workers=1 epochs=1 model.variant=cifar20 model.width=8 precision=fp32"
    command = [*LOCKSTEP, "train", str(cifar10), f"data.path={photographs}", *small.split(), "-n", "2", "--run", "here"]
    finished = run(command, tmp_path, timeout_s=170)
    assert finished.code == 0, finished.err
    events = list(read_jsonl(tmp_path / "here" / "events.jsonl"))
    assert events[-1]["metrics"]["accuracy"] > 0.2, "of ten classes"
    (words,) = [event["texts"]["guesses"] for event in events if "texts" in event]
    assert len(words.splitlines()) == 3
