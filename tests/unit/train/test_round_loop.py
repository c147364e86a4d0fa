"""A run that goes by rounds: it resumes, stops and is compared like one that goes by steps."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import Stopped, UserError
from lockstep.events.step_trace import first_difference
from lockstep.train.run import Run
from lockstep.world.world import World


class Walk:
    """What a round changes: a position, and the path to it."""

    def __init__(self) -> None:
        self.position = torch.zeros(3, dtype=torch.float64)
        self.visits: list[int] = []

    def go(self, number: int) -> None:
        self.position = self.position * 0.5 + number
        self.visits.append(number)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "visits": self.visits}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.visits = state["position"], list(state["visits"])


def walk(folder: Path, count: int, *, stop_in: int | None = None, **options: Any) -> tuple[str, list[int]]:
    run, walk = Run(folder, World(), sinks=[], **options), Walk()
    run.register_state("walk", walk, in_digest=True)
    try:
        for each in run.rounds(count):
            if each.number == stop_in:
                os.kill(os.getpid(), signal.SIGTERM)
                assert each.is_asked_to_stop
            walk.go(each.number)
        return run.finish(), walk.visits
    finally:
        run.close(abandon=True)


def test_rounds_are_made_in_order_and_count_in_the_digest(tmp_path: Path) -> None:
    digest, visits = walk(tmp_path / "a", 4)
    assert visits == [1, 2, 3, 4]
    assert walk(tmp_path / "b", 4)[0] == digest != walk(tmp_path / "c", 5)[0]


def test_stopped_by_a_signal_it_resumes_with_the_next_round(tmp_path: Path) -> None:
    digest, _ = walk(tmp_path / "whole", 5, trace=True)
    with pytest.raises(Stopped, match="after step 2"):
        walk(tmp_path / "cut", 5, stop_in=2, trace=True)
    assert walk(tmp_path / "cut", 5, trace=True) == (digest, [1, 2, 3, 4, 5])
    assert first_difference(tmp_path / "whole" / "digests.jsonl", tmp_path / "cut" / "digests.jsonl") is None


def test_a_round_that_is_stopped_inside_is_made_again(tmp_path: Path) -> None:
    run, path = Run(tmp_path, World(), sinks=[]), Walk()
    run.register_state("walk", path, in_digest=True)
    with pytest.raises(Stopped, match="after step 1"):
        for each in run.rounds(3):
            if each.number == 2:
                each.stop()
            path.go(each.number)
    run.close(abandon=True)
    assert walk(tmp_path, 3)[1] == [1, 2, 3]


def test_a_finished_run_makes_no_more_rounds_unless_it_is_asked_for_more(tmp_path: Path) -> None:
    digest, _ = walk(tmp_path, 2)
    assert walk(tmp_path, 2) == (digest, [1, 2])
    assert walk(tmp_path, 3)[1] == [1, 2, 3]


def test_a_run_with_models_has_no_rounds(tmp_path: Path) -> None:
    run = Run(tmp_path, World(), sinks=[])
    run.prepare(nn.Linear(2, 2))
    with pytest.raises(UserError, match="without models"):
        next(run.rounds(2))


def trained(steps: list[int], resume_after: int | None = None) -> dict[str, torch.Tensor]:
    """Train a run without a folder in calls of these numbers of steps; after one of them, continue in another run."""
    data = torch.utils.data.TensorDataset(torch.arange(24.0).reshape(12, 2) / 24, torch.ones(12, 1))

    def begin() -> tuple[Run, nn.Module, torch.optim.Optimizer]:
        run = Run(None, World(), seed=3, sinks=[])
        model = run.prepare(nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1)))
        return run, model, run.optimizer(model, lambda params: torch.optim.AdamW(params, lr=0.01))

    run, model, optimizer = begin()
    for number, count in enumerate(steps):
        for step in run.steps(run.loader(data, 4, lanes=2), steps=count, finish=False):
            step.accumulate(lambda model, batch: ((model(batch[0]) - batch[1]).square().sum(), len(batch[0])), model)
            step.update(optimizer)
        if number == resume_after:
            state = run.state_dict()
            run, model, optimizer = begin()
            run.load_state_dict(state)
    return run.state()


def test_a_run_without_a_folder_continues_from_its_state(tmp_path: Path) -> None:
    whole, cut = trained([2, 3, 2]), trained([2, 3, 2], resume_after=1)
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert not torch.equal(whole["model/0.weight"], trained([2, 3])["model/0.weight"])


def test_the_settings_of_rounds_may_not_change_between_attempts(tmp_path: Path) -> None:
    def go(count: int, settings: dict[str, Any]) -> list[int]:
        run = Run(tmp_path, World(), sinks=[])
        try:
            numbers = [each.number for each in run.rounds(count, settings=settings)]
            run.finish()
            return numbers
        finally:
            run.close(abandon=True)

    assert go(1, {"size": 4}) == [1]
    with pytest.raises(UserError, match="size: 4 → 5"):
        go(2, {"size": 5})
    assert go(2, {"size": 4}) == [2]


def test_a_run_that_ended_early_continues_if_its_reason_no_longer_holds(tmp_path: Path) -> None:
    def go(count: int, *, last: int | None = None, is_over: bool | None = None) -> list[int]:
        run = Run(tmp_path, World(), sinks=[])
        numbers = []
        try:
            for each in run.rounds(count, is_over=None if is_over is None else lambda: is_over):
                numbers.append(each.number)
                each.is_last = each.number == last
            run.finish()
            return numbers
        finally:
            run.close(abandon=True)

    assert go(4, last=2) == [1, 2]
    assert go(4) == go(4, is_over=True) == go(5) == []
    assert go(4, is_over=False) == [3, 4]
    assert go(4, is_over=False) == [], "all rounds are made"
