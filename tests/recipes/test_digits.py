"""The digits recipe through the real command: it learns, and leaves a run folder that says how."""

import json
from pathlib import Path

import torch

from lockstep.checkpoint.store import latest_checkpoint, load_weights
from lockstep.events.jsonl import read_lines
from lockstep.recipes.registry import load_recipe
from lockstep.train.trainer import Trainer
from tests.commands import LOCKSTEP, run


def test_it_reaches_97_percent_on_two_processes(tmp_path: Path) -> None:
    finished = run([*LOCKSTEP, "train", "digits", "-n", "2", "seed=1"], tmp_path)
    assert finished.code == 0, finished.err
    folder = tmp_path / "runs" / "digits"
    events = list(read_lines(folder / "events.jsonl"))
    assert events[0]["kind"] == "start"
    assert events[0]["effective_batch"] == 64
    assert events[0]["processes"] == 2
    assert events[-1]["kind"] == "end"
    accuracy = events[-1]["metrics"]["accuracy"]
    assert accuracy >= 0.97
    losses = [event["loss"] for event in events if event["kind"] == "step"]
    assert losses[-1] < losses[0] / 10

    # The saved model, in a bare module on one device, is the model that was evaluated.
    recipe, config = load_recipe("digits", ["seed=1"])
    checkpoint = latest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    model = recipe.model(config)
    model.load_state_dict(load_weights(checkpoint))
    trainer = Trainer(model, torch.optim.SGD(model.parameters()), recipe.loss, recipe.metrics)
    test_set = torch.utils.data.DataLoader(recipe.data(config).test, batch_size=64)
    assert trainer.evaluate(test_set)["accuracy"] == accuracy

    facts = json.loads((folder / "run.json").read_text())
    assert facts["fingerprint"]["torch"] == torch.__version__
    assert {"data_s", "compute_s", "peak_host_bytes"} <= next(read_lines(folder / "ranks" / "1.jsonl")).keys()


def test_quick_json_and_quiet(tmp_path: Path) -> None:
    finished = run([*LOCKSTEP, "train", "digits", "--quick", "--json"], tmp_path)
    assert finished.code == 0, finished.err
    kinds = [json.loads(line)["kind"] for line in finished.out.splitlines()]
    assert kinds == ["start", "step", "eval", "checkpoint", "end"]
    quiet = run([*LOCKSTEP, "train", "digits", "--quick", "--quiet"], tmp_path)
    assert (quiet.code, quiet.out) == (0, "")
    attempts = {event["attempt"] for event in read_lines(tmp_path / "runs" / "digits-quick" / "events.jsonl")}
    assert attempts == {1, 2}, "the same config comes back to its folder"
    refused = run([*LOCKSTEP, "train", "digits", "--quick", "optim.lr=1"], tmp_path)
    assert refused.code == 2
    assert "optim.lr: 0.003 → 1.0" in refused.err


def test_the_split_is_by_index_and_disjoint() -> None:
    recipe, config = load_recipe("digits")
    splits = recipe.data(config)
    assert (len(splits.train), len(splits.test)) == (1437, 360)  # type: ignore[arg-type]
