"""The promise: a run that is interrupted at any step resumes on any number of processes with the same bits."""

import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import cycle, repeat
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep.checkpoint.checkpoint_contents import checkpoint_digest
from lockstep.checkpoint.checkpoint_store import CheckpointStore
from lockstep.data.evaluation_loader import EvaluationLoader
from lockstep.errors import Stopped
from lockstep.testing import ranks
from lockstep.train.callbacks import Callback, EarlyStopping, SaveBest
from lockstep.train.resume.checkpoint_policy import CheckpointPolicy
from lockstep.train.run import Run
from lockstep.train.trainer import Trainer
from lockstep.world.world import World
from tests.classification import loss
from tests.contracts.resume_workloads import Ended, Noisy, train_all
from tests.contracts.workloads import WORKLOADS, Trained, train
from tests.unit.data.datasets import Cursors, Lines, Plain

LOADER = {"global_batch": 40, "lanes": 8}
STEPS = 5
RULES = {"average": "mean", "newest": "first", "high*": "max"}


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_resumes_from_every_step(name: str, tmp_path: Path) -> None:
    """Saved on four processes, resumed on one, three and two."""
    options = {"buffers": RULES} if name == "remembering" else {}
    whole = train(World(), name, STEPS, LOADER, **options)
    for stop, size in zip(range(1, STEPS), cycle([1, 3, 2]), strict=False):
        folder = tmp_path / str(stop)
        ranks(4).run(train, name, STEPS, LOADER, folder, stop_after=stop, **options)
        rest = ranks(size).run(train, name, STEPS, LOADER, folder, **options)[0]
        assert_same(rest, whole)
        assert rest.losses == whole.losses[stop:]


def assert_same(result: Trained, whole: Trained) -> None:
    assert not [name for name in whole.tensors if result.tensors.get(name) != whole.tensors[name]]
    assert result.digest == whole.digest


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_with_every_option_resumes_from_every_step(precision: str, tmp_path: Path) -> None:
    whole = train_all(World(), None, None, precision=precision)
    for stop in range(1, 8):
        train_all(World(), tmp_path / str(stop), stop, precision=precision)
        rest = train_all(World(), tmp_path / str(stop), None, precision=precision)
        assert rest == whole._replace(rates=whole.rates[stop:])


STOPS = st.lists(st.integers(1, 7), max_size=3, unique=True).map(sorted)


SIZES = st.sampled_from([1, 2, 3, 4])
AUTO = repeat("auto")


def interrupted(
    stops: list[int], sizes: Iterator[int], workers: Iterator[int], strategies: Iterator[str] = AUTO
) -> Ended:
    with tempfile.TemporaryDirectory() as folder:
        for stop in [*stops, None]:
            group, parallel = ranks(next(sizes)), next(strategies)
            ended = group.run(train_all, Path(folder, "run"), stop, next(workers), parallel=parallel)[0]
    return ended


@settings(max_examples=12, deadline=None)
@given(
    stops=STOPS,
    sizes=st.lists(SIZES, min_size=4, max_size=4),
    strategies=st.lists(st.sampled_from(["ddp", "zero"]), min_size=4, max_size=4),
)
def test_any_stops_on_any_numbers_of_processes_change_no_bit(
    stops: list[int], sizes: list[int], strategies: list[str]
) -> None:
    ended, whole = interrupted(stops, iter(sizes), repeat(0), iter(strategies)), _whole()
    assert (ended.digest, ended.difficulty) == (whole.digest, whole.difficulty)


def test_another_number_of_workers_changes_no_bit() -> None:
    ended, whole = interrupted([2, 5], iter([1, 2, 1]), iter([2, 0, 1])), _whole()
    assert (ended.digest, ended.difficulty) == (whole.digest, whole.difficulty)


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(
    stops=STOPS,
    sizes=st.lists(SIZES, min_size=4, max_size=4),
    workers=st.lists(st.integers(0, 2), min_size=4, max_size=4),
)
def test_any_stops_processes_and_workers_change_no_bit(stops: list[int], sizes: list[int], workers: list[int]) -> None:
    ended, whole = interrupted(stops, iter(sizes), iter(workers)), _whole()
    assert (ended.digest, ended.difficulty) == (whole.digest, whole.difficulty)


@cache
def _whole() -> Ended:
    """Train once for all examples."""
    return train_all(World(), None, None)


def test_the_digest_of_a_checkpoint_is_that_of_the_run(tmp_path: Path) -> None:
    ended = train_all(World(), tmp_path / "run", 3, precision="fp16")
    assert checkpoint_digest(CheckpointStore(tmp_path / "run" / "checkpoints").load(3).values) == ended.digest


STREAMS = {"lanes": lambda: Lines(lengths={0: 9, 1: 4, 2: 5, 3: 7}), "cursors": Cursors, "plain": lambda: Plain(21)}


def train_stream(
    world: World, kind: str, folder: Path | None, stop_after: int | None, workers: int = 0, **length: int
) -> tuple[str, list[list[float]]]:
    torch.set_num_threads(1)
    run = Run(folder, world, seed=4, sinks=[])
    run.stop_after = stop_after
    model = run.prepare(nn.Linear(1, 1))
    optimizer = run.optimizer(model, lambda params: torch.optim.Adam(params, lr=0.1))
    seen: list[list[float]] = []

    def squares(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        seen[-1] += batch.tolist()
        return (model(batch.float().unsqueeze(1) / 1000) ** 2).sum(), len(batch)

    try:
        for step in run.steps(
            run.loader(STREAMS[kind](), 8, lanes=4, tail="short", workers=workers), **length, finish=False
        ):
            seen.append([])
            step.accumulate(squares, model)
            step.update(optimizer)
        run.finish()
    except Stopped:
        run.close()
    return run.digest(), seen


@pytest.mark.parametrize("length", [{"epochs": 2}, {"steps": 7}], ids=["epochs", "steps"])
@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_resumes_in_the_middle_of_an_epoch(kind: str, length: dict[str, int], tmp_path: Path) -> None:
    whole, seen = train_stream(World(), kind, None, None, **length)
    for stop, (before, after, workers) in zip(range(1, len(seen) + 1), cycle([(1, 1, 0), (3, 2, 0), (2, 1, 0)])):
        folder = tmp_path / str(stop)
        ranks(before).run(train_stream, kind, folder, stop, workers, **length)
        digest, rest = ranks(after).run(train_stream, kind, folder, None, workers, **length)[0]
        assert digest == whole, f"stopped after {stop}"
        assert len(rest) == len(seen) - stop
        if after == 1:
            assert rest == seen[stop:]


def test_a_stream_resumes_with_another_number_of_workers(tmp_path: Path) -> None:
    whole, _ = train_stream(World(), "lanes", None, None, steps=7)
    train_stream(World(), "lanes", tmp_path / "a", 3, 2, steps=7)
    assert train_stream(World(), "lanes", tmp_path / "a", None, 0, steps=7)[0] == whole
    train_stream(World(), "lanes", tmp_path / "b", 3, 0, steps=7)
    assert train_stream(World(), "lanes", tmp_path / "b", None, 1, steps=7)[0] == whole


class Told(NamedTuple):
    digest: str
    history: list[dict[str, Any]]
    best: int | None
    steps: list[int]  # made in this attempt


class Steps(Callback):
    def __init__(self) -> None:
        self.numbers: list[int] = []

    def on_step(self, trainer: Trainer, step: Any) -> None:
        self.numbers.append(step.number)


def accuracy(model: nn.Module, batch: Sequence[Tensor]) -> dict[str, tuple[Tensor, int]]:
    inputs, labels = batch
    return {"accuracy": ((model(inputs).argmax(1) == labels).sum(), len(labels))}


def train_with_a_trainer(
    world: World, folder: Path | None, stop_after: int | None, evaluate_every: str, patience: int = 100, **length: int
) -> Told:
    torch.set_num_threads(1)
    run = Run(folder, world, seed=6, sinks=[])
    run.stop_after = stop_after
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    steps = Steps()
    keep_best = SaveBest("accuracy", "max")
    callbacks = [steps, keep_best, EarlyStopping("accuracy", "max", patience)]
    trainer = Trainer(
        model, torch.optim.AdamW(model.parameters(), lr=0.02), loss, accuracy, callbacks=callbacks, run=run
    )
    trainer.ema = run.ema(trainer.model, 0.9)
    loader = run.loader(Noisy(), 16, lanes=4, tail="short")
    test = EvaluationLoader(Noisy(), 16, world)
    saving = CheckpointPolicy(2, keep=2)
    try:
        trainer.train(loader, test, evaluate_every=evaluate_every, checkpoints=saving, **length)
        run.finish()
    except Stopped:
        run.close()
    best = None if folder is None else CheckpointStore(folder / "checkpoints").best()
    assert best in (None, keep_best.best.step)
    return Told(run.digest(), trainer.history, best, steps.numbers)


@pytest.mark.parametrize("evaluate_every", ["1 epoch", "2 steps", "5 steps"])
def test_a_trainer_resumes_as_if_never_stopped(evaluate_every: str, tmp_path: Path) -> None:
    """History, best model and evaluations inside an epoch are the same, wherever it was stopped."""
    whole = train_with_a_trainer(World(), tmp_path / "whole", None, evaluate_every, epochs=3)
    assert whole.best is not None
    for stop in range(1, 9):
        folder = tmp_path / str(stop)
        first = train_with_a_trainer(World(), folder, stop, evaluate_every, epochs=3)
        rest = ranks(2).run(train_with_a_trainer, folder, None, evaluate_every, epochs=3)[0]
        assert first.steps + rest.steps == whole.steps
        assert rest._replace(steps=[]) == whole._replace(steps=[]), f"stopped after {stop}"


def test_patience_is_remembered_and_a_stopped_run_stays_stopped(tmp_path: Path) -> None:
    whole = train_with_a_trainer(World(), tmp_path / "whole", None, "2 steps", patience=2, steps=60)
    assert len(whole.steps) < 60, "it was to stop early"
    train_with_a_trainer(World(), tmp_path / "a", len(whole.steps) - 1, "2 steps", patience=2, steps=60)
    rest = train_with_a_trainer(World(), tmp_path / "a", None, "2 steps", patience=2, steps=60)
    assert rest._replace(steps=[]) == whole._replace(steps=[])
    again = train_with_a_trainer(World(), tmp_path / "a", None, "2 steps", patience=2, steps=60)
    assert again == rest._replace(steps=[])


def test_a_finished_run_has_nothing_left_to_do_unless_more_is_asked_for(tmp_path: Path) -> None:
    whole = train_with_a_trainer(World(), tmp_path / "a", None, "1 epoch", epochs=2)
    again = train_with_a_trainer(World(), tmp_path / "a", None, "1 epoch", epochs=2)
    assert again == whole._replace(steps=[])
    longer = train_with_a_trainer(World(), tmp_path / "a", None, "1 epoch", epochs=3)
    in_one_go = train_with_a_trainer(World(), tmp_path / "b", None, "1 epoch", epochs=3)
    assert longer == in_one_go._replace(steps=in_one_go.steps[len(whole.steps) :])


def train_in_two_parts(
    world: World, folder: Path | None, stop_after: int | None, is_finished_between: bool
) -> tuple[str, list[int]]:
    """Train in one loop, then in another; each of them may finish the run."""
    run = Run(folder, world, seed=1, sinks=[])
    run.stop_after = stop_after
    model = run.prepare(nn.Linear(6, 3))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    made = []

    def steps() -> Iterator[Any]:
        yield from run.steps(run.loader(Noisy(), 16, lanes=4), steps=3, finish=is_finished_between)
        yield from run.steps(run.loader(Noisy(), 16, lanes=4), epochs=2, finish=is_finished_between)

    try:
        for step in steps():
            step.accumulate(loss, model)
            step.update(optimizer)
            made.append(step.number)
        if not is_finished_between:
            run.finish()
    except Stopped:
        run.close()
    return run.digest(), made


@pytest.mark.parametrize("is_finished_between", [False, True])
def test_a_script_with_two_loops_resumes_in_the_right_one(tmp_path: Path, is_finished_between: bool) -> None:
    whole, made = train_in_two_parts(World(), None, None, is_finished_between)
    for stop in range(1, len(made) + 1):
        folder = tmp_path / str(stop)
        first = train_in_two_parts(World(), folder, stop, is_finished_between)[1]
        digest, rest = train_in_two_parts(World(), folder, None, is_finished_between)
        assert (digest, first + rest) == (whole, made)
        assert train_in_two_parts(World(), folder, None, is_finished_between) == (whole, [])
        assert 0 not in CheckpointStore(folder / "checkpoints").steps()
