"""The digits recipe through the real command: it learns, and leaves a complete run folder."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lockstep.checkpoint.checkpoint_store import best_checkpoint, latest_checkpoint, load_weights
from lockstep.data.evaluation_loader import EvaluationLoader
from lockstep.errors import UserError
from lockstep.events.jsonl import read_jsonl
from lockstep.events.run_folder import RunFolder
from lockstep.recipes.registry import load_recipe
from lockstep.train.recipe import recipe_for_run
from lockstep.train.run import Run
from lockstep.train.train_job import train_recipe
from lockstep.train.trainer import Trainer
from lockstep.world.world import World
from tests.commands import LOCKSTEP, call, run
from tests.sinks import RecordingSink
from tests.unit.recipes.image_files import write_cifar, write_idx


def test_it_reaches_97_percent_on_two_processes(tmp_path: Path) -> None:
    finished = run([*LOCKSTEP, "train", "digits", "-n", "2", "seed=1"], tmp_path)
    assert finished.code == 0, finished.err
    folder = tmp_path / "runs" / "digits"
    events = list(read_jsonl(folder / "events.jsonl"))
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
    recipe = recipe_for_run(config, recipe)
    checkpoint = latest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    model = recipe.model(config)
    model.load_state_dict(load_weights(checkpoint))
    trainer = Trainer(model, torch.optim.SGD(model.parameters()), recipe.loss, recipe.metrics)
    test_set = torch.utils.data.DataLoader(recipe.data(config).test, batch_size=64)
    assert trainer.evaluate(test_set)["accuracy"] == accuracy

    facts = json.loads((folder / "run.json").read_text())
    assert facts["fingerprint"]["torch"] == torch.__version__
    assert {"data_s", "compute_s", "peak_host_bytes"} <= next(read_jsonl(folder / "ranks" / "1.jsonl")).keys()


def test_quick_json_and_quiet(tmp_path: Path) -> None:
    finished = run([*LOCKSTEP, "train", "digits", "--quick", "--json"], tmp_path)
    assert finished.code == 0, finished.err
    kinds = [json.loads(line)["kind"] for line in finished.out.splitlines()]
    assert kinds == ["start", "step", "eval", "checkpoint", "end"]
    quiet = run([*LOCKSTEP, "train", "digits", "--quick", "--quiet"], tmp_path)
    assert (quiet.code, quiet.out) == (0, "")
    attempts = {event["attempt"] for event in read_jsonl(tmp_path / "runs" / "digits-quick" / "events.jsonl")}
    assert attempts == {1, 2}, "the same config comes back to its folder"
    refused = call(["train", "digits", "--quick", "optim.lr=1"], tmp_path)
    assert refused.code == 2
    assert "optim.lr: 0.003 → 1.0" in refused.err


def test_the_split_is_by_index_and_disjoint() -> None:
    recipe, config = load_recipe("digits")
    recipe = recipe_for_run(config, recipe)
    splits = recipe.data(config)
    assert (len(splits.train), len(splits.test)) == (1437, 360)  # type: ignore[arg-type]


@pytest.mark.parametrize(("write", "shape"), [(write_idx, (1, 12, 12)), (write_cifar, (3, 32, 32))])
def test_the_users_own_images_in_a_standard_format(
    write: Callable[..., Path], shape: tuple[int, ...], tmp_path: Path
) -> None:
    folder = write(tmp_path / "images", train=80)
    overrides = f"data.path={folder} data.show=10 model.width=4 batch.global=16 lanes=1 epochs=12 optim.lr=1e-2"
    recipe, config = load_recipe("digits", overrides.split())
    recipe = recipe_for_run(config, recipe)
    sink = RecordingSink()
    torch.set_num_threads(1)
    outcome = train_recipe(recipe, config, World(), RunFolder(tmp_path / "run"), [sink])
    assert recipe.data(config).test[0][0].shape == shape
    assert outcome.metrics["accuracy"] > 0.5, "of ten kinds of brightness"
    (words,) = [event["texts"]["guesses"] for event in sink.events if "texts" in event]
    assert words.count("is") == round(10 * (1 - outcome.metrics["accuracy"])), "every label is there twice, in order"
    assert (tmp_path / "run" / "media" / "guesses-60.png").is_file()


def test_images_that_are_too_small_are_refused(tmp_path: Path) -> None:
    recipe, config = load_recipe("digits", [f"data.path={write_idx(tmp_path, side=3)}"])
    recipe = recipe_for_run(config, recipe)
    with pytest.raises(UserError, match=r"data.path=.*: 3 × 3 pixels: expected 4 or more a side"):
        recipe.model(config)


def test_a_config_with_every_option_trains_the_same_on_one_and_two_processes(tmp_path: Path) -> None:
    (tmp_path / "all.yaml").write_text(
        """
base: digits
epochs: 3
precision: bf16
clip_norm: 1.0
on_nonfinite: skip
optim: {lr_scaling: sqrt, base_batch: 16, groups: [{match: "*.bias", weight_decay: 0.0}]}
schedule: {kind: cosine, warmup: 10 steps, final: 0.05}
average: {decay: 0.95}
best: {metric: accuracy, mode: max}
early_stopping: {metric: accuracy, mode: max, patience: 2}
"""
    )
    ends = []
    for number, name in ((1, "one"), (2, "two")):
        finished = run([*LOCKSTEP, "train", "all.yaml", "-n", str(number), "--run", name], tmp_path)
        assert finished.code == 0, finished.err
        assert "learning rate 0.006 in bf16" in finished.out  # 0.003 times the root of 64 / 16
        ends.append(list(read_jsonl(tmp_path / name / "events.jsonl"))[-1])
    assert ends[0]["digest"] == ends[1]["digest"]
    assert ends[0]["metrics"] == ends[1]["metrics"]

    events = list(read_jsonl(tmp_path / "two" / "events.jsonl"))
    rates = [event["lr"] for event in events if event["kind"] == "step"]
    assert rates[0] == pytest.approx(0.006)
    assert rates[-1] < 0.001
    best = best_checkpoint(tmp_path / "two" / "checkpoints")
    assert best is not None
    evaluations = [event for event in events if event["kind"] == "eval"]
    winner = max(evaluations, key=lambda event: (event["metrics"]["accuracy"], -event["step"]))
    assert best.name == f"step-{winner['step']}"

    # What was evaluated, and called the best, are the averaged weights.
    recipe, config = load_recipe(str(tmp_path / "all.yaml"))
    recipe = recipe_for_run(config, recipe)
    model = recipe.model(config)
    model.load_state_dict(load_weights(best))
    average = load_weights(best, "average")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(average[parameter_name])
    session = Run(None, World(), precision="bf16")
    test_set = EvaluationLoader(recipe.data(config).test, config.evaluation_batch, World())
    assert session.evaluate(model, test_set, recipe.metrics) == winner["metrics"]

    history = json.loads((tmp_path / "two" / "history.json").read_text())
    assert [entry["step"] for entry in history] == [event["step"] for event in evaluations]
    assert history[-1]["accuracy"] == ends[1]["metrics"]["accuracy"]
    assert 0 < history[-1]["train_loss"] < history[0]["train_loss"]
