"""Who is overdue, and who is merely slow, busy or waiting."""

import time
from pathlib import Path

import pytest

from lockstep.supervision.examination import Observation, RankNow
from lockstep.supervision.failure import Scene
from lockstep.supervision.process import ProcessState
from lockstep.supervision.pulse import Phase, Reading
from lockstep.supervision.rank_files import RankFiles
from lockstep.supervision.standing import Judged, Meeting
from lockstep.supervision.watch import Limits, Watch, find_culprits

S = 30.0


def reading(phase: Phase, step: int = 5, longest_s: dict[Phase, float] | None = None) -> Reading:
    return Reading(1, 1, step, phase, 0.0, None, False, False, longest_s or {}, [])


def limits(**longest_s: float) -> Limits:
    known = Limits(S)
    known.learn(reading(Phase.SCRIPT, 5, {Phase[name]: value for name, value in longest_s.items()}))
    return known


def rank(
    number: int, phase: Phase, age_s: float, *, step: int = 5, busy: bool = False, waits: bool = False, state: str = "S"
) -> Judged:
    exit_code = 0 if state == "ended" else None
    known = {Phase.COMPUTING: 1.0} if phase != Phase.SCRIPT else {}
    seen = Observation(
        number, exit_code, reading(phase, step, known), age_s, ProcessState(1, "python", state[0], 0.0, 0, 0)
    )
    return Judged(seen, age_s, busy, Meeting("barrier", None) if waits else None)


@pytest.mark.parametrize(
    ("longest_s", "expected"), [({}, 10 * S), ({"DATA": 0.1}, S), ({"DATA": 8.0}, 80.0), ({"SAVING": 8.0}, 10 * S)]
)
def test_a_limit_follows_what_the_phase_has_needed(longest_s: dict[str, float], expected: float) -> None:
    assert limits(**longest_s).of(reading(Phase.DATA)) == expected


def test_a_limit_never_forgets_the_slowest_rank_nor_the_attempt_before() -> None:
    known = limits(DATA=8.0)
    known.learn(reading(Phase.DATA, 5, {Phase.DATA: 1.0}))
    assert known.of(reading(Phase.DATA)) == 80.0


def test_nothing_is_known_about_a_script_before_its_first_step() -> None:
    known = limits(SCRIPT=0.1)
    assert known.of(reading(Phase.SCRIPT, 0)) == 10 * S
    assert known.of(reading(Phase.SCRIPT, 1)) == S


KNOWN = limits(DATA=0.1, COMPUTING=0.1, EXCHANGING=0.1, SCRIPT=0.1)
WAITS = rank(0, Phase.EXCHANGING, 50, waits=True)


@pytest.mark.parametrize(
    ("other", "culprits"),
    [
        (rank(1, Phase.COMPUTING, 31), {1}),
        (rank(1, Phase.COMPUTING, 29), None),  # still within its limit, however long the others wait
        (rank(1, Phase.COMPUTING, 299, busy=True), None),
        (rank(1, Phase.COMPUTING, 301, busy=True), {1}),
        (rank(1, Phase.SAVING, 299), None),  # nobody has completed that yet
        (rank(1, Phase.SAVING, 301), {1}),
        (rank(1, Phase.SAVING, 31, state="T"), {1}),  # what is stopped is not slow
        (rank(1, Phase.COMPUTING, 3000, state="t"), None),  # somebody debugs it
        (rank(1, Phase.EXCHANGING, 31, waits=True), set()),
        (rank(1, Phase.EXCHANGING, 29, waits=True), None),
        (rank(1, Phase.LEAVING, 1, state="ended"), set()),
        (rank(1, Phase.SCRIPT, 301, step=0), {1}),  # somebody waits for it
    ],
)
def test_who_is_overdue_while_a_rank_waits(other: Judged, culprits: set[int] | None) -> None:
    assert find_culprits([WAITS, other], KNOWN, is_alone=True) == culprits


@pytest.mark.parametrize(
    ("alone", "culprits"),
    [
        (rank(0, Phase.SCRIPT, 5000, step=0), None),  # a script that does not train may take its time
        (rank(0, Phase.SCRIPT, 31, step=3), {0}),
        (rank(0, Phase.LEAVING, 5000, state="ended"), None),
        (rank(0, Phase.DATA, 31), {0}),
    ],
)
def test_who_is_overdue_while_nobody_waits(alone: Judged, culprits: set[int] | None) -> None:
    assert find_culprits([alone], KNOWN, is_alone=True) == culprits


def test_ranks_that_wait_for_another_machine_are_told_later() -> None:
    assert find_culprits([WAITS], KNOWN, is_alone=False) is None
    assert find_culprits([rank(0, Phase.EXCHANGING, 61, waits=True)], KNOWN, is_alone=False) == set()


def test_after_a_pause_of_the_agent_itself_time_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that slept, or a job that a scheduler suspended, is no hang."""
    now = time.monotonic()
    watch = Watch(1.0, lambda number: RankFiles(tmp_path, number), lambda _: None)
    pulse = reading(Phase.DATA)._replace(since=now, longest_s={Phase.DATA: 0.1})
    ranks = [RankNow(0, 2**22 + 1, None, pulse)]  # no process has that number
    looks = []
    monkeypatch.setattr("lockstep.supervision.watch.examine", lambda *_: looks.append(1) or [])
    for later_s, num_looks in ((0.1, 0), (3600.0, 0), (3600.5, 0), (3601.5, 1)):
        monkeypatch.setattr("lockstep.supervision.watch.time.monotonic", lambda at=now + later_s: at)
        watch.look(ranks, lambda: Scene(1))
        assert len(looks) == num_looks, later_s
