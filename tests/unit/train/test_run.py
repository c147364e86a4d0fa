"""A run on one process: what it prepares, leaves behind and refuses."""

import logging
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

import lockstep
from lockstep.engine.fast_engine import FastEngine
from lockstep.engine.one_lane_engine import OneLaneEngine
from lockstep.engine.tree_engine import TreeEngine
from lockstep.errors import UserError
from lockstep.events.jsonl import read_jsonl
from lockstep.train.run import Run
from lockstep.world.world import World
from tests.classification import DATA, loss
from tests.sinks import RecordingSink


def train(run: Run, model: nn.Module | None = None, data: Any = DATA, epochs: int = 1, **options: Any) -> nn.Module:
    model = run.prepare(nn.Linear(4, 3) if model is None else model)
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    for step in run.steps(run.loader(data, 16, **options), epochs=epochs):
        step.accumulate(loss, model)
        step.update(optimizer)
        if step.every(2):
            run.log(loss=step.loss)
    return model


def test_a_folder_with_events_settings_and_the_digest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path / "a", World(), seed=3, trace=True)
    train(run)
    events = list(read_jsonl(tmp_path / "a" / "events.jsonl"))
    kinds = [(event["kind"], event["step"]) for event in events]
    assert kinds == [("start", 0), ("step", 2), ("step", 4), ("checkpoint", 4), ("end", 4)]
    assert events[0]["lanes"] == 8
    assert events[0]["total_steps"] == 4
    assert events[-1]["digest"] == run.digest()
    assert f"digest {run.digest()}" in capsys.readouterr().out.splitlines()[-1]
    assert [line["step"] for line in read_jsonl(tmp_path / "a" / "digests.jsonl")] == [1, 2, 3, 4]


def test_its_folder(tmp_path: Path) -> None:
    assert Run(str(tmp_path / "a"), World(), sinks=[]).folder == tmp_path / "a"
    assert Run(None, World()).folder is None


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(Run(tmp_path / name, World(), seed=seed, trace=True, sinks=[]))
    assert lockstep.first_difference(tmp_path / "a" / "digests.jsonl", tmp_path / "b" / "digests.jsonl") is None
    parted = lockstep.first_difference(tmp_path / "a" / "digests.jsonl", tmp_path / "c" / "digests.jsonl")
    assert parted is not None
    assert (parted.step, parted.phase, parted.tensor) == (1, "data", "lane 0")


@pytest.mark.parametrize("leaves_early", [False, True])
def test_data_workers_end_with_the_loop(leaves_early: bool) -> None:
    run = Run(None, World())
    model = run.prepare(nn.Linear(4, 3))
    optimizer = run.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before, num_workers = set(multiprocessing.active_children()), []
    for step in run.steps(run.loader(DATA, 16, workers=1), steps=3, finish=False):
        step.accumulate(loss, model)
        step.update(optimizer)
        num_workers.append(len(set(multiprocessing.active_children()) - before))
        if leaves_early:
            break
    assert num_workers == ([1] if leaves_early else [1, 1, 1])
    assert set(multiprocessing.active_children()) == before


def test_other_settings_in_the_same_folder_are_refused(tmp_path: Path) -> None:
    train(Run(tmp_path / "a", World(), seed=1, sinks=[]))
    with pytest.raises(UserError, match=r"(?s)another config.*seed: 1 → 2"):
        train(Run(tmp_path / "a", World(), seed=2, sinks=[]))
    train(Run(tmp_path / "a", World(), seed=1, sinks=[]))


def test_the_loop_can_be_left_early_and_continued(tmp_path: Path) -> None:
    run = Run(tmp_path / "a", World(), sinks=[])
    model = run.prepare(nn.Linear(4, 3))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    seen = []
    for _ in range(2):
        for step in run.steps(run.loader(DATA, 16), steps=100, finish=False):
            seen.append((step.number, step.batch.number))
            step.accumulate(loss, model)
            step.update(optimizer)
            if step.every(3):
                break
    run.log(loss=1.0)
    run.finish()
    assert seen == [(number + 1, number) for number in range(6)]
    last = list(read_jsonl(tmp_path / "a" / "events.jsonl"))[-3:]
    assert [(event["kind"], event["step"]) for event in last] == [("step", 6), ("checkpoint", 6), ("end", 6)]


def test_zero_steps_yield_nothing() -> None:
    run = Run(None, World())
    run.prepare(nn.Linear(4, 3))
    assert list(run.steps(run.loader(DATA, 16), steps=0)) == []
    assert list(run.steps(run.loader(DATA, 16), epochs=0)) == []


def test_a_step_that_is_skipped_consumes_its_batch_and_does_not_count() -> None:
    run = Run(None, World())
    model = run.prepare(nn.Linear(4, 3))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    numbers = []
    for step in run.steps(run.loader(DATA, 16), epochs=1):
        numbers.append((step.batch.number, step.number))
        if step.batch.number != 1:
            step.accumulate(loss, model)
            step.update(optimizer)
        else:
            step.skip()
    assert numbers == [(0, 1), (1, 2), (2, 2), (3, 3)]
    assert (run.batches, run.step) == (4, 3)


def test_epochs_of_a_stream() -> None:
    class Stream(IterableDataset[tuple[Tensor, Tensor]]):
        def __iter__(self) -> Any:
            return iter(DATA)

    run = Run(None, World())
    train(run, data=Stream(), epochs=3)
    assert run.step == 12


def test_evaluation_counts_every_sample_once() -> None:
    run = Run(None, World())
    model = run.prepare(nn.Linear(4, 3))
    correct = lambda model, batch: {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}  # noqa: E731
    expected = (model(DATA.tensors[0]).argmax(1) == DATA.tensors[1]).double().mean().item()
    for batch in (5, 64, 1000):
        assert run.evaluate(model, DATA, correct, batch=batch)["accuracy"] == pytest.approx(expected)
    assert model.training


def test_evaluation_leaves_modes_and_streams_as_they_were() -> None:
    run = Run(None, World())
    model = run.prepare(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3).eval()))
    torch.manual_seed(0)
    drawn: list[float] = []

    def draw(_model: nn.Module, batch: Sequence[Tensor]) -> dict[str, tuple[float, int]]:
        drawn.append(torch.rand(1).item())
        return {"drawn": (drawn[-1] * len(batch[0]), len(batch[0]))}

    first = run.evaluate(model, DATA, draw, batch=16)
    assert run.evaluate(model, DATA, draw, batch=16) == first
    assert len(set(drawn)) == 4
    assert torch.rand(1).item() == torch.rand(1, generator=torch.Generator().manual_seed(0)).item()
    with pytest.raises(ZeroDivisionError):
        run.evaluate(model, DATA, lambda _model, _batch: 1 // 0)  # type: ignore[arg-type, return-value]
    assert [module.training for module in model.modules()] == [True, True, False]


def test_a_custom_sampler_is_used_unchanged() -> None:
    run = Run(None, World())
    own = DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 8, drop_last=True))
    assert not run.loader(own).exact
    assert run.loader(DataLoader(DATA, batch_size=8)).exact
    model = run.prepare(nn.Linear(4, 3))
    seen = []
    for step in run.steps(run.loader(own), epochs=1, finish=False):
        seen.append(step.batch.lanes[0].data[1].tolist())
        step.skip()
    assert seen == [list(part) for part in DATA.tensors[1].view(8, 8).tolist()]
    assert model.training


def test_a_dataloader_needs_no_loader() -> None:
    def weights_of(wrap: bool) -> list[float]:
        run = Run(None, World())
        model = run.prepare(nn.Linear(4, 3))
        optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
        own = DataLoader(DATA, batch_size=16, shuffle=True)
        for step in run.steps(run.loader(own) if wrap else own, epochs=2):
            step.accumulate(loss, model)
            step.update(optimizer)
        weights: list[float] = model.weight.flatten().tolist()
        return weights

    assert weights_of(wrap=False) == weights_of(wrap=True)


@pytest.mark.parametrize(
    ("determinism", "lanes", "engine"),
    [("lockstep", 1, OneLaneEngine), ("lockstep", 2, TreeEngine), ("fast", 2, FastEngine)],
)
def test_the_engine_follows_mode_and_lanes(determinism: Any, lanes: int, engine: type) -> None:
    run = Run(None, World(), determinism=determinism)
    run.prepare(nn.Linear(4, 3))
    steps = run.steps(run.loader(DATA, 16, lanes=lanes), steps=1, finish=False)
    next(steps)
    assert isinstance(run._loop.engine, engine)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), {"tail": "pad"}, "tail=pad with batch norm"),
        (nn.Sequential(nn.Linear(4, 3), nn.SyncBatchNorm(3)), {}, "is a SyncBatchNorm"),
        (None, {"lanes": 32}, "32"),
        (None, {"lanes": 3}, "lanes=3: expected a power of two"),
    ],
)
def test_what_cannot_keep_the_promise_is_refused(model: nn.Module | None, options: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        train(Run(None, World()), model, **options)


def test_small_lanes_under_batch_norm_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lockstep"):
        train(Run(None, World()), nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    assert "batch norm sees 2 samples at a time (global batch 16 in 8 lanes)" in caplog.text


class Changing(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layer = nn.Linear(4, 3)
        self.register_buffer("memory", torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.layer(inputs)
        if self.how == "in place":
            self.memory += 1
        elif self.how == "replaced":
            self.memory = self.memory + 1
        else:
            self.memory.data.add_(1)
        return scores


@pytest.mark.parametrize("how", ["in place", "replaced", "through .data"])
def test_a_buffer_without_a_rule_may_not_change(how: str) -> None:
    with pytest.raises(UserError, match=r"changes the buffer memory: set how .* buffers=\{'memory'"):
        train(Run(None, World()), Changing(how))
    train(Run(None, World(), buffers={"mem*": "max"}), Changing(how))


def test_a_rule_must_match_something() -> None:
    with pytest.raises(UserError, match="'codebook' matches no buffer"):
        train(Run(None, World(), buffers={"codebook": "mean"}))


def test_a_rule_must_fit_the_buffer() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with pytest.raises(UserError, match=r"1.num_batches_tracked holds torch.int64, which has no mean"):
        train(Run(None, World(), buffers={"*tracked": "mean"}), model)


def test_frozen_batch_norm_keeps_its_statistics_to_the_bit() -> None:
    norm = nn.BatchNorm1d(3)
    norm.running_mean = torch.tensor([0.1, 0.2, 0.3])
    model = nn.Sequential(nn.Linear(4, 3), norm.eval())
    train(Run(None, World()), model, tail="short")
    assert norm.running_mean is not None
    assert torch.equal(norm.running_mean, torch.tensor([0.1, 0.2, 0.3]))


def test_arguments_are_checked() -> None:
    with pytest.raises(UserError, match="expected lockstep or fast"):
        Run(None, World(), determinism="exact")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="trace=True needs a folder"):
        Run(None, World(), trace=True)
    run = Run(None, World())
    with pytest.raises(UserError, match="lazy modules"):
        run.prepare(nn.LazyLinear(3))
    with pytest.raises(UserError, match="LBFGS"):
        other = Run(None, World())
        other.optimizer(other.prepare(nn.Linear(2, 2)), lambda params: torch.optim.LBFGS(params))
    with pytest.raises(UserError, match="needs global_batch="):
        run.loader(DATA)
    with pytest.raises(UserError, match=r"^uneven=.join. is only for a DataLoader with its own sampler: .*tail="):
        run.loader(DATA, 16, uneven="join")
    with pytest.raises(
        UserError, match=r"^run.loader\(dataloader, …\) has no option workers: set it in the DataLoader"
    ):
        run.loader(DataLoader(DATA, batch_size=8), workers=2)
    with pytest.raises(UserError, match="nothing to train"):
        next(run.steps(run.loader(DATA, 16), steps=1))
    with pytest.raises(UserError, match=r"^run\.steps\(…\): give epochs= or steps=$"):
        next(run.steps(run.loader(DATA, 16)))
    with pytest.raises(UserError, match=r"^run\.steps\(…\): give either epochs= or steps=, not both$"):
        next(run.steps(run.loader(DATA, 16), epochs=1, steps=1))


class Once(IterableDataset[Tensor]):
    """A stream that can be read only once and counts how much was read."""

    def __init__(self, length: int) -> None:
        self.samples = iter([(torch.ones(4), torch.tensor(0)) for _ in range(length)])

    def __iter__(self) -> Any:
        return self.samples


@pytest.mark.parametrize("tail", ["drop", "short"])
def test_an_epoch_of_a_stream_reads_nothing_of_the_next(tail: str) -> None:
    run = Run(None, World(), sinks=[])
    train(run, data=Once(40), tail=tail)
    assert run.step == (2 if tail == "drop" else 3)


def test_an_incident_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    for sinks in ([], [RecordingSink()]):
        caplog.clear()
        run = Run(None, World(), sinks=sinks, on_nonfinite="skip")
        model = run.prepare(nn.Linear(4, 3))
        optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
        step = next(iter(run.steps(run.loader(DATA, 16), steps=1, finish=False)))
        step.accumulate(lambda model, batch: (loss(model, batch)[0] * torch.nan, 1), model)
        step.update(optimizer)
        assert len(caplog.messages) == (not sinks)
        assert all(len(sink.of("incident")) == 1 for sink in sinks)
        run.close(abandon=True)


def test_a_fast_step_without_a_loss_is_an_error() -> None:
    run = Run(None, World(), determinism="fast")
    run.prepare(nn.Linear(4, 3))
    step = next(iter(run.steps(run.loader(DATA, 16), steps=1, finish=False)))
    with pytest.raises(UserError, match="no lane had a loss"):
        for _ in step.lanes:
            pass
    run.close(abandon=True)


class WithoutLength:
    """A batch sampler that does not say how many batches there will be."""

    def __iter__(self) -> Any:
        yield from ([0, 1], [2, 3])


def test_a_loader_without_a_length_is_counted_in_steps() -> None:
    run = Run(None, World(), sinks=[])
    model = run.prepare(nn.Linear(4, 3))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    for step in run.steps(run.loader(DataLoader(DATA, batch_sampler=WithoutLength())), steps=3):  # type: ignore[arg-type]
        step.accumulate(loss, model)
        step.update(optimizer)
    assert (run.step, run.batches) == (3, 3)
