"""Loggers in real runs: only rank 0 logs, and the bits are those of a run without loggers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from lockstep.config.job_schema import LogConfig, WandbConfig
from lockstep.errors import UserError
from lockstep.events.jsonl import read_jsonl
from lockstep.loggers.logger_factory import open_loggers
from lockstep.testing import ranks
from lockstep.train.run import Run
from lockstep.world.world import World
from tests.classification import DATA, loss
from tests.wandb_files import config, exit_code, history, offline_runs, run_record

BOTH = LogConfig(tensorboard=True, wandb=WandbConfig(mode="offline", project="p"))


def train(world: World, folder: Path, log: LogConfig) -> dict[str, Any]:
    """Train with the loggers on every rank; the run must let only rank 0 use them."""
    run = Run(folder, world, sinks=open_loggers(log, folder))
    model = run.prepare(nn.Linear(4, 3))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    services = 0
    for step in run.steps(run.loader(DATA, 16), epochs=1, finish=False):
        step.accumulate(loss, model)
        step.update(optimizer)
        run.log(loss=step.loss)
        if step.every(2):
            run.log_image("weights", model.weight.detach().sigmoid())
            run.log_text("said", f"by rank {world.rank}")
        services = sum(child.name() == "wandb-core" for child in psutil.Process().children())
    run.log_image(f"rank {world.rank}", torch.eye(3))
    weights = model.weight.detach().sigmoid().numpy()
    digest = run.finish()
    left = [child.name() for child in psutil.Process().children(recursive=True) if "wandb" in child.name()]
    return {"digest": digest, "services": services, "left": left, "weights": weights}


def curve(folder: Path, name: str) -> list[tuple[int, float]]:
    reader = EventAccumulator(str(folder / "tensorboard"), {"scalars": 0})
    reader.Reload()
    return [(point.step, point.value) for point in reader.Scalars(name)]


def test_only_rank_0_logs_and_logging_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    folder = tmp_path / "run"
    first, second = ranks(2).run(train, folder, BOTH)
    assert (first["services"], second["services"]) == (1, 0)
    assert first["left"] == second["left"] == []
    (silent,) = ranks(1).run(train, tmp_path / "silent", LogConfig())
    assert first["digest"] == second["digest"] == silent["digest"]

    events = list(read_jsonl(folder / "events.jsonl"))
    losses = [(event["step"], event["loss"]) for event in events if "loss" in event]
    assert [step for step, _ in losses] == [1, 2, 3, 4]
    assert [event["images"] for event in events if "images" in event] == [
        {"weights": "media/weights-2.png"},
        {"weights": "media/weights-4.png"},
        {"rank 0": "media/rank_0-73d7ee4d-4.png"},
    ]
    assert [event["texts"] for event in events if "texts" in event] == [{"said": "by rank 0"}] * 2
    assert {path.name for path in (folder / "media").iterdir()} == {
        "weights-2.png",
        "weights-4.png",
        "rank_0-73d7ee4d-4.png",
    }
    pixels = np.asarray(Image.open(folder / "media/weights-4.png"))
    assert np.array_equal(pixels, np.rint(first["weights"] * 255))

    assert curve(folder, "train/loss") == [(step, np.float32(value)) for step, value in losses]
    assert len(list((folder / "tensorboard").iterdir())) == 1

    (file,) = offline_runs(folder)
    steps = history(file)
    assert [(step, steps[step]["train/loss"]) for step in (1, 2, 3, 4)] == losses
    assert (file.parent / "files" / steps[4]["images/weights.path"]).read_bytes() == (
        folder / "media/weights-4.png"
    ).read_bytes()
    assert run_record(file).run_id == json.loads((folder / "run.json").read_text())["run_id"]
    assert config(file)["global_batch"] == 16
    assert exit_code(file) == 0
    assert list(home.iterdir()) == []


def test_a_second_attempt_resumes_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for _ in range(2):
        ranks(2).run(train, folder, BOTH)
    first, second = offline_runs(folder)
    assert run_record(first).run_id == run_record(second).run_id
    assert [event["attempt"] for event in read_jsonl(folder / "events.jsonl") if event["kind"] == "start"] == [1, 2]
    assert [step for step, _ in curve(folder, "train/loss")] == [1, 2, 3, 4]


def log_invalid_images(world: World, folder: Path) -> list[str]:
    run = Run(folder, world, sinks=[])
    run.prepare(nn.Linear(4, 3))
    messages = []
    for _ in run.steps(run.loader(DATA, 16), steps=1, finish=False):
        for name, image in (("a", torch.zeros(2, 2, 2)), ("", torch.zeros(2, 2))):
            try:
                run.log_image(name, image)
            except UserError as error:
                messages.append(str(error))
        break
    run.close()
    return messages


def test_an_invalid_image_is_the_same_error_on_every_rank(tmp_path: Path) -> None:
    first, second = ranks(2).run(log_invalid_images, tmp_path / "run")
    assert first == second
    assert len(first) == 2
    assert not (tmp_path / "run" / "media").exists()


def test_images_without_a_folder_or_a_disk_do_not_stop_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for folder in (None, tmp_path / "run"):
        run = Run(folder, World(), sinks=[])
        run.prepare(nn.Linear(4, 3))
        run.log_image("early", torch.zeros(2, 2))
        for _ in run.steps(run.loader(DATA, 16), steps=1, finish=False):
            if folder is not None:
                (folder / "media").write_text("a file where the folder should be")
            run.log_image("a", torch.zeros(2, 2))
            break
        run.close()
    assert [message.split(":")[0] for message in caplog.messages] == ["image 'a' of step 1 could not be written"]
