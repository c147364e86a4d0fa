"""Injecting faults ends whatever the run does, and reports why a run stopped making progress."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from lockstep.chaos import fault_injector
from lockstep.chaos.chaos_checks import ChaosCheck
from lockstep.chaos.fault_injector import FaultInjector
from lockstep.chaos.fault_plan import PlannedFault, draw_fault_plan
from lockstep.events.run_folder import RunFolder


def run_rounds(
    make: Callable[..., FaultInjector], folder: Path, settings: Sequence[str], plan: Sequence[PlannedFault]
) -> list[list[ChaosCheck]]:
    (folder / "memory").mkdir()
    return make(settings, folder, folder / "memory", plan, 1, report=lambda _: None).run_rounds(reference_s=0.0)


def test_a_fault_for_which_no_run_has_a_moment_does_not_start_runs_forever(tmp_path: Path) -> None:
    asked: list[PlannedFault] = []

    class NoMoment(FaultInjector):
        def _make_round(self, run: RunFolder) -> list[ChaosCheck]:
            asked.append(self._pending[0])
            assert len(asked) < 5
            return [ChaosCheck("all is well")]

    plan = draw_fault_plan(1, 1, processes=2, steps=10, with_data_workers=False)
    rounds = run_rounds(NoMoment, tmp_path, ["digits"], plan)
    assert len(rounds) == 2
    assert asked[0] == plan[0]
    assert (asked[1].victim, asked[1].moment, asked[1].after_steps) == ("launcher", "step", 0)


@pytest.fixture
def short_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the commands that read checkpoints."""

    def passed(*_: RunFolder | Mapping[str, str]) -> ChaosCheck:
        return ChaosCheck("skipped")

    monkeypatch.setattr(fault_injector, "check_audit", passed)
    monkeypatch.setattr(fault_injector, "check_saved", passed)


@pytest.mark.usefixtures("short_checks")
def test_an_undisturbed_launcher_that_gives_up_is_reported(tmp_path: Path) -> None:
    (checks,) = run_rounds(FaultInjector, tmp_path, ["nowhere.yaml"], [])
    (problem,) = checks[0].problems
    assert problem.startswith("an undisturbed launcher ended with exit code 2: lockstep: ")
    assert "nowhere.yaml" in problem


@pytest.mark.usefixtures("short_checks")
def test_a_run_without_progress_is_reported_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_injector, "_STUCK_S", 0.3)
    (checks,) = run_rounds(FaultInjector, tmp_path, ["digits"], [])
    (problem,) = checks[0].problems
    assert problem.startswith("no progress for 0 s: process ")
