"""Stopping early, keeping the best, and the points at which callbacks are called."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.checkpoint.checkpoint_store import CheckpointStore
from lockstep.data.evaluation_loader import EvaluationLoader
from lockstep.errors import UserError
from lockstep.events.event_log import Sink
from lockstep.train.callbacks import Best, Callback, EarlyStopping, SaveBest
from lockstep.train.run import Run
from lockstep.train.step import Step
from lockstep.train.trainer import Trainer
from lockstep.world.world import World
from tests.sinks import RecordingSink

DATA = TensorDataset(torch.arange(8.0).unsqueeze(1))


def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    return model(batch[0]).sum(), len(batch[0])


class Scripted:
    """A metrics function that returns the given values in turn."""

    def __init__(self, *values: float) -> None:
        self.values = iter(values)

    def __call__(self, _model: nn.Module, _batch: list[Tensor]) -> dict[str, Any]:
        return {"score": (next(self.values), 1)}


def train(
    values: list[float],
    callbacks: list[Callback],
    epochs: int = 6,
    folder: Path | None = None,
    sinks: Sequence[Sink] = (),
    **options: Any,
) -> Trainer:
    run = Run(folder, World(), sinks=sinks)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    trainer = Trainer(model, optimizer, loss, Scripted(*values), callbacks=callbacks, run=run)
    trainer.train(run.loader(DATA, 4), EvaluationLoader(DATA, 8, run.world), epochs=epochs, **options)
    run.finish()
    return trainer


def test_it_stops_after_n_evaluations_without_an_improvement() -> None:
    trainer = train([1.0, 3.0, 2.0, 3.0, 9.0], [EarlyStopping("score", "max", patience=2)])
    assert [entry["score"] for entry in trainer.history] == [1.0, 3.0, 2.0, 3.0]
    assert trainer.step == 8
    assert trainer.run.batches == 8, "the batch that was fetched but not used is still to come"


def test_an_improvement_restarts_the_count() -> None:
    values = [1.0, 0.0, 2.0, 1.0, 3.0, 0.0]
    assert len(train(values, [EarlyStopping("score", "max", patience=2)]).history) == 6


def test_lower_may_be_better_and_small_improvements_may_not_count() -> None:
    values = [5.0, 4.0, 3.99, 3.98, 1.0]
    assert len(train(values, [EarlyStopping("score", "min", patience=2, min_delta=0.1)]).history) == 4
    assert len(train([*values, 1.0], [EarlyStopping("score", "min", patience=2)]).history) == 6


def test_a_nan_is_never_the_best() -> None:
    best = Best("score", "max")
    assert not best.improves(1, {"score": float("nan")})
    assert best.improves(2, {"score": -1.0})
    assert not best.improves(3, {"score": float("nan")})
    assert (best.step, best.value) == (2, -1.0)


def test_the_best_is_saved_when_it_is_reached(tmp_path: Path) -> None:
    kept = RecordingSink()
    keep = SaveBest("score", "max")
    train([1.0, 3.0, 2.0, 3.0, 4.0, 0.0], [keep], folder=tmp_path / "a", sinks=[kept])
    saved = [(event["step"], event["is_best"]) for event in kept.of("checkpoint")]
    assert saved == [(2, True), (4, True), (10, True), (12, False)]
    assert (keep.best.step, keep.best.value) == (10, 4.0)
    assert CheckpointStore(tmp_path / "a" / "checkpoints").best() == 10


def test_an_unknown_metric_is_named_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="no metric is called 'accuracy'; known: score"):
        train([1.0], [EarlyStopping("accuracy", "max", patience=1)])


@pytest.mark.parametrize(("mode", "patience"), [("up", 1), ("max", 0)])
def test_bad_settings_are_refused(mode: Any, patience: int) -> None:
    with pytest.raises(UserError, match=r"mode=|patience="):
        EarlyStopping("score", mode, patience)


class Diary(Callback):
    def __init__(self) -> None:
        self.pages: list[str] = []

    def on_start(self, trainer: Trainer) -> None:
        self.pages.append("start")

    def on_step(self, trainer: Trainer, step: Step) -> None:
        self.pages.append(f"step {step.number}")

    def on_evaluate(self, trainer: Trainer, metrics: Any) -> None:
        self.pages.append(f"evaluate {metrics['score']:g} after {trainer.step}")

    def on_end(self, trainer: Trainer) -> None:
        self.pages.append("end")


def test_callbacks_are_called_in_order() -> None:
    diary = Diary()
    train([1.0, 2.0], [diary], epochs=2)
    assert diary.pages == [
        *("start", "step 1", "step 2", "evaluate 1 after 2", "step 3", "step 4", "evaluate 2 after 4", "end")
    ]


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: Trainer, step: Step) -> None:
        if step.number == self.step:
            trainer.stop("enough")


@pytest.mark.parametrize(("last", "steps"), [(3, [2, 3]), (4, [2, 4])])
def test_the_end_is_evaluated_wherever_a_callback_stops(last: int, steps: list[int]) -> None:
    trainer = train([0.0] * 9, [StopAt(last)])
    assert [entry["step"] for entry in trainer.history] == steps


@pytest.mark.parametrize(
    ("every", "steps"),
    [("2 epochs", [4, 8, 10]), ("3 steps", [3, 6, 9, 10]), (4, [4, 8, 10]), ("12 samples", [3, 6, 9, 10])],
)
def test_evaluation_is_as_frequent_as_requested(every: Any, steps: list[int]) -> None:
    trainer = train([0.0] * 9, [], epochs=5, evaluate_every=every)
    assert [entry["step"] for entry in trainer.history] == steps


def test_a_skipped_step_is_neither_reported_nor_counted() -> None:
    """The third batch of four has a NaN, in both epochs."""
    diary = Diary()
    run = Run(None, World(), on_nonfinite="skip", log_every=1)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    trainer = Trainer(model, optimizer, loss, Scripted(*[0.0] * 9), callbacks=[diary], run=run)
    poisoned = torch.arange(8.0).unsqueeze(1)
    poisoned[4] = torch.nan
    train_loader = run.loader(TensorDataset(poisoned), 2, lanes=1, shuffle=False)
    trainer.train(train_loader, EvaluationLoader(DATA, 8, run.world), epochs=2, evaluate_every="2 steps")
    run.close()
    assert [page for page in diary.pages if page.startswith("step")] == [f"step {number}" for number in range(1, 7)]
    assert [entry["step"] for entry in trainer.history] == [2, 4, 6]
    assert run.batches == 8
    assert all(math.isfinite(entry["train_loss"]) for entry in trainer.history), "no NaN in the mean"


@pytest.mark.parametrize(("mode", "worst"), [("min", torch.inf), ("max", -torch.inf)])
def test_an_infinity_is_no_better_than_itself(mode: Any, worst: float) -> None:
    best = Best("loss", mode)
    assert [best.improves(step, {"loss": value}) for step, value in enumerate([worst, worst, 3.0, worst])] == [
        True,
        False,
        True,
        False,
    ]
