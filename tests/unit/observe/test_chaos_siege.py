"""The driver of the attacks: it comes to an end whatever the run does, and says why a run went no further."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from lockstep.events.run_folder import RunFolder
from lockstep.observe.chaos import siege
from lockstep.observe.chaos.checks import Check
from lockstep.observe.chaos.endurance import Verdict
from lockstep.observe.chaos.plan import Attack, draw_plan
from lockstep.observe.chaos.siege import Made, Siege, Tally
from lockstep.observe.chaos.watch import Watch
from lockstep.supervision.pulse import Phase, Reading


def lay(make: Callable[..., Siege], folder: Path, settings: Sequence[str], plan: Sequence[Attack]) -> list[list[Check]]:
    (folder / "memory").mkdir()
    return make(settings, folder, folder / "memory", plan, 1, tell=lambda _: None).lay(reference_s=0.0)


def test_an_attack_for_which_no_run_has_a_moment_does_not_begin_runs_for_ever(tmp_path: Path) -> None:
    asked: list[Attack] = []

    class NoMoment(Siege):
        def _make_round(self, run: RunFolder) -> list[Check]:
            asked.append(self._pending[0])
            assert len(asked) < 5
            return [Check("all is well")]

    plan = draw_plan(1, 1, processes=2, steps=10, with_data_workers=False)
    rounds = lay(NoMoment, tmp_path, ["digits"], plan)
    assert len(rounds) == 2
    assert asked[0] == plan[0]
    assert (asked[1].victim, asked[1].moment, asked[1].after_steps) == ("launcher", "step", 0)


@pytest.fixture
def short_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the commands that look at checkpoints."""

    def passed(*_: RunFolder | Mapping[str, str]) -> Check:
        return Check("not looked at")

    monkeypatch.setattr(siege, "audit", passed)
    monkeypatch.setattr(siege, "check_saved", passed)


@pytest.mark.usefixtures("short_checks")
def test_a_launcher_that_gave_up_although_nobody_disturbed_it_is_told(tmp_path: Path) -> None:
    (checks,) = lay(Siege, tmp_path, ["nowhere.yaml"], [])
    (fault,) = checks[0].faults
    assert fault.startswith("a launcher that nobody had disturbed ended with exit code 2: lockstep: ")
    assert "nowhere.yaml" in fault


@pytest.mark.usefixtures("short_checks")
def test_a_run_that_stands_still_is_told_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siege, "_STUCK_S", 0.3)
    (checks,) = lay(Siege, tmp_path, ["digits"], [])
    (fault,) = checks[0].faults
    assert fault.startswith("nothing has moved for 0 s: [Process(")


class Ranks:
    """A job, as far as it is watched."""

    def __init__(self) -> None:
        self.step = 0

    def pulses(self) -> dict[int, Reading]:
        return {
            0: Reading(
                pid=1,
                main_thread=1,
                step=self.step,
                phase=Phase.COMPUTING,
                since=0.0,
                sample=None,
                is_stopping=False,
                has_compiler=False,
                longest_s={},
                data_workers=[],
            )
        }


def test_a_rank_that_outlives_the_kill_of_another_process_does_not_stand_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    watch, job = Watch(), Ranks()
    watch.look(job)  # type: ignore[arg-type]
    watch.doom(job)  # type: ignore[arg-type]
    for job.step in range(1, 4):
        now += 10.0
        view = watch.look(job)  # type: ignore[arg-type]
        assert watch.still_s == 0.0
        assert view.first_step is None, "it was to end"
    now += 10.0
    watch.look(job)  # type: ignore[arg-type]
    assert watch.still_s == 10.0


def test_too_few_kills_are_not_called_a_loss() -> None:
    kill = Made(0.0, 1, 1, 1, 2, "launcher", 7, "kill", "step", None, None, is_saving=False, is_hit=True)
    good, bad = (Check("the end"),), (Check("the end", ("is another",)),)

    def verdict(kills: int, checks: tuple[Check, ...]) -> tuple[int, str]:
        found = Verdict(kills, Tally([kill]), (checks,), "abc")
        return found.exit_code, found.lines()[-1]

    assert verdict(1, good) == (0, "nothing was lost: digest abc")
    assert verdict(1, bad) == (3, "something was lost")
    code, text = verdict(2, good)
    assert code == 3
    assert text.startswith("nothing was lost, but only 1 of 2 kills could be made: ")
