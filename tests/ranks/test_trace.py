"""Traces of runs on several ranks: the same text on any number of them, and the phase in which a fault shows."""

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import lockstep
from lockstep.errors import LockstepError, Stopped
from lockstep.testing import ranks
from lockstep.train.run import Run
from lockstep.world.world import World

NUM_STEPS, STOP_AFTER = 4, 2


class Samples(Dataset[tuple[Tensor, int]]):
    """Augmented from the streams that are seeded for every sample. An epoch is a full batch and a short one."""

    def __len__(self) -> int:
        return 88

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((4,), index / 88) + torch.randn(4), index % 3


class UnseededSamples(Samples):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        inputs, label = super().__getitem__(index)
        return inputs + random.SystemRandom().random(), label


class Classifier(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
        self.unused = nn.Parameter(torch.zeros(2))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in list(self)[:4]:
            inputs = layer(inputs)
        return inputs


class DependsOnTheProcess(Classifier):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * (1 + os.getpid() % 1000 / 1000)


class BackwardDependsOnTheProcess(Classifier):
    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        outputs.register_hook(lambda gradient: gradient * (1 + os.getpid() % 1000 / 1000))
        return outputs


class Counts(Classifier):
    """Scales its output by a step count that is in no checkpoint. The same on any number of ranks."""

    seen_version, num_steps = -1, 0

    def forward(self, inputs: Tensor) -> Tensor:
        weight = self[0].weight
        assert isinstance(weight, Tensor)
        if weight._version != self.seen_version:
            self.seen_version, self.num_steps = weight._version, self.num_steps + 1
        return super().forward(inputs) * (1 + self.num_steps / 10)


class DependsOnTheRank(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.param_groups[0]["params"][0].data += lockstep.get_rank() * 1e-3


def loss(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    inputs, labels = batch
    batch[0].mul_(2)  # in place: the trace shows the data as it was given
    return F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)


def train(
    world: World,
    folder: str,
    make_model: Callable[[], nn.Module] = Classifier,
    data: Dataset[Any] | None = None,
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    stop_after: int | None = None,
    **options: Any,
) -> str | None:
    """Return the digest, or None if the run was stopped or the ranks differed."""
    run = Run(folder, world, seed=3, trace=True, sinks=[], **options)
    run.stop_after = stop_after
    model = run.prepare(make_model())
    optimizer = run.optimizer(model, lambda params: make_optimizer(params, lr=0.1, momentum=0.9))
    run.ema(model)
    loader = run.loader(data or Samples(), 64, lanes=4, tail="short")
    try:
        for step in run.steps(loader, steps=NUM_STEPS, finish=False):
            step.accumulate(loss, model)
            step.update(optimizer)
        return run.finish()
    except (Stopped, LockstepError):
        run.close()
        return None


def trace_of(folder: Path) -> Path:
    return folder / "digests.jsonl"


def test_a_trace_is_the_same_text_on_any_number_of_ranks_and_through_a_resume(tmp_path: Path) -> None:
    texts = set()
    for number in (1, 2, 3):
        assert ranks(number).run(train, str(tmp_path / str(number)))[0] is not None
        texts.add(trace_of(tmp_path / str(number)).read_text())
    ranks(3).run(train, str(tmp_path / "zero"), parallel="zero")
    texts.add(trace_of(tmp_path / "zero").read_text())
    assert ranks(2).run(train, str(tmp_path / "resumed"), stop_after=STOP_AFTER) == [None, None]
    ranks(1).run(train, str(tmp_path / "resumed"))
    texts.add(trace_of(tmp_path / "resumed").read_text())
    assert len(texts) == 1
    first = texts.pop().splitlines()[0]
    for part in ('"lane 3": ', '"loss": "', '"model/unused": "none"', '"average/0.weight": '):
        assert part in first


@pytest.mark.parametrize(
    ("phase", "options"),
    [
        ("data", {"data": UnseededSamples()}),
        ("loss", {"make_model": DependsOnTheProcess}),
        ("gradient", {"make_model": BackwardDependsOnTheProcess}),
        ("state", {"make_optimizer": DependsOnTheRank}),
    ],
)
def test_a_planted_fault_shows_in_its_phase_of_the_first_step(
    tmp_path: Path, phase: str, options: dict[str, Any]
) -> None:
    for number in (1, 2):
        ranks(number).run(train, str(tmp_path / str(number)), **options)
    parted = lockstep.first_difference(trace_of(tmp_path / "1"), trace_of(tmp_path / "2"))
    assert parted is not None
    assert (parted.step, parted.phase) == (1, phase)
    if phase == "state":
        assert (parted.tensor, parted.num_tensors) == ("model/unused", 2), "and the average of it"


def test_what_is_in_no_checkpoint_shows_in_the_first_step_after_the_resume(tmp_path: Path) -> None:
    for name, stops in (("whole", [None]), ("resumed", [STOP_AFTER, None])):
        for stop_after in stops:
            ranks(2).run(train, str(tmp_path / name), make_model=Counts, stop_after=stop_after)
    parted = lockstep.first_difference(trace_of(tmp_path / "whole"), trace_of(tmp_path / "resumed"))
    assert parted is not None
    assert (parted.step, parted.phase) == (STOP_AFTER + 1, "loss")
