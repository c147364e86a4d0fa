"""The checks of a disturbed run find what was lost."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.chaos.chaos_checks import (
    check_audit,
    check_end,
    check_evaluations,
    check_resumes,
    check_run,
    check_saved,
    check_steps,
)
from lockstep.events.run_folder import RunFolder
from lockstep.train.run import Run
from lockstep.world.world import World


def line(step: int, **changed: str) -> dict[str, Any]:
    digests = {phase: f"{phase} of {step}" for phase in ("data", "loss", "gradient", "state")} | changed
    return {"step": step, "phases": {phase: {"x": digest} for phase, digest in digests.items()}}


def event(kind: str, step: int, **fields: Any) -> dict[str, Any]:
    return {"t": 0.0, "attempt": 1, "step": step, "kind": kind, **fields}


def run_folder(
    path: Path, trace: Sequence[dict[str, Any]], starts: Sequence[int], digest: str = "d", history: object = ()
) -> RunFolder:
    path.mkdir()
    run = RunFolder(path)
    events = [*(event("start", step) for step in starts), event("end", 5, digest=digest)]
    run.trace.write_text("".join(json.dumps(each) + "\n" for each in trace))
    run.events.write_text("".join(json.dumps(each) + "\n" for each in events))
    run.history.write_text(json.dumps(history))
    return run


@pytest.fixture
def reference(tmp_path: Path) -> RunFolder:
    return run_folder(tmp_path / "reference", [line(step) for step in range(1, 6)], [0])


@pytest.fixture
def disturbed(tmp_path: Path) -> Callable[..., RunFolder]:
    def make(
        steps: Sequence[int] = (1, 2, 3, 2, 3, 4, 5), starts: Sequence[int] = (0, 0, 1, 3), **more: Any
    ) -> RunFolder:
        more.setdefault("trace", [line(step) for step in steps])
        return run_folder(tmp_path / "disturbed", starts=starts, **more)

    return make


def test_a_run_that_lost_nothing_passes(reference: RunFolder, disturbed: Callable[..., RunFolder]) -> None:
    checks = check_run(reference, disturbed())
    assert len(checks) > 3
    assert all(check.is_passed for check in checks)


def test_another_final_digest_is_found(reference: RunFolder, disturbed: Callable[..., RunFolder]) -> None:
    assert not check_end(reference, disturbed(digest="e")).is_passed


def test_a_run_without_an_end_is_found(reference: RunFolder, disturbed: Callable[..., RunFolder]) -> None:
    run = disturbed()
    run.events.write_text(json.dumps(event("start", 0)) + "\n")
    assert check_end(reference, run).problems == ("it did not record its end",)


@pytest.mark.parametrize("phase", ["data", "loss", "gradient", "state"])
def test_a_step_that_differs_is_found_although_it_was_made_again(
    reference: RunFolder, disturbed: Callable[..., RunFolder], phase: str
) -> None:
    trace = [line(1), line(2, **{phase: "other"}), line(2), line(3), line(4), line(5)]
    (problem,) = check_steps(reference, disturbed(trace=trace)).problems
    assert problem == f"step 2: its {phase} differs from the undisturbed run"


def test_missing_and_surplus_steps_are_found(reference: RunFolder, disturbed: Callable[..., RunFolder]) -> None:
    problems = check_steps(reference, disturbed(steps=[1, 2, 4, 5, 6])).problems
    assert problems == ("step 6: the undisturbed run has no such step", "step 3 was never made")


@pytest.mark.parametrize(
    ("steps", "starts", "problem"),
    [
        ((1, 2, 3, 3, 4, 5), (0, 1), "after step 3 came step 3, but no attempt started there"),
        ((1, 2, 4, 5), (0, 3), "after step 2 came step 4: the steps between are missing"),
        ((2, 3, 4, 5), (0,), "after step 0 came step 2, but no attempt started there"),
        ((1, 2, 1, 2, 3), (0, 1), "after step 2 came step 1, but no attempt started there"),
    ],
)
def test_an_attempt_that_resumed_at_another_step_is_found(
    disturbed: Callable[..., RunFolder], steps: Sequence[int], starts: Sequence[int], problem: str
) -> None:
    assert check_resumes(disturbed(steps=steps, starts=starts)).problems == (problem,)


def test_a_lost_evaluation_is_found(reference: RunFolder, disturbed: Callable[..., RunFolder]) -> None:
    assert not check_evaluations(reference, disturbed(history=[{"step": 5}])).is_passed


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that was really trained: two epochs of three steps."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)

    folder = tmp_path_factory.mktemp("saved") / "run"
    run = Run(folder, World(), seed=1, sinks=[])
    model = run.prepare(nn.Linear(4, 3))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    samples = TensorDataset(torch.ones(48, 4), torch.arange(48) % 3)
    for step in run.steps(run.loader(samples, 16, lanes=4), epochs=2, save_every=2, keep=1):
        step.accumulate(loss, model)
        step.update(optimizer)
    run.finish()
    return RunFolder(folder)


def test_samples_that_no_commit_has_used_are_found(saved: RunFolder) -> None:
    text = saved.ledger.read_text()
    first, *_ = text.splitlines()
    try:
        saved.ledger.write_text(text.replace(json.dumps(json.loads(first)["spans"]), "[]"))
        problems = check_audit(saved, {}).problems
    finally:
        saved.ledger.write_text(text)
    assert "begins with batch 2: batches 0 to 1 are missing" in problems[-1]


def test_an_audit_that_fails_to_run_is_not_passed(monkeypatch: pytest.MonkeyPatch, saved: RunFolder) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")  # ends without output
    assert check_audit(saved, {}).problems == ("it ended with exit code 1",)


def test_a_saved_state_other_than_the_final_one_is_found(saved: RunFolder, reference: RunFolder) -> None:
    (problem,) = check_saved(reference, saved, {}).problems
    assert problem.startswith("expected d, found ")
