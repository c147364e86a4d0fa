"""Which ranks are overdue, and which are merely slow, busy or waiting."""

import time
from pathlib import Path

import pytest

from lockstep.supervision.agent_folder import RankFiles
from lockstep.supervision.failure_report import FailureContext
from lockstep.supervision.hang_detector import HangDetector, PhaseLimits, find_hung_ranks
from lockstep.supervision.heartbeat import Heartbeat, Phase
from lockstep.supervision.linux_processes import ProcessState
from lockstep.supervision.rank_probe import RankObservation, RankStatus
from lockstep.supervision.wait_analysis import PeerWait, WaitAnalysis

S = 30.0


def beat(phase: Phase, step: int = 5, longest_s: dict[Phase, float] | None = None) -> Heartbeat:
    return Heartbeat(1, 1, step, phase, 0.0, None, False, False, longest_s or {}, [])


def limits(**longest_s: float) -> PhaseLimits:
    known = PhaseLimits(S)
    known.learn(beat(Phase.SCRIPT, 5, {Phase[name]: value for name, value in longest_s.items()}))
    return known


def rank(
    number: int, phase: Phase, age_s: float, *, step: int = 5, busy: bool = False, waits: bool = False, state: str = "S"
) -> WaitAnalysis:
    exit_code = 0 if state == "ended" else None
    known = {Phase.COMPUTING: 1.0} if phase != Phase.SCRIPT else {}
    seen = RankObservation(
        number, exit_code, beat(phase, step, known), age_s, ProcessState(1, "python", state[0], 0.0, 0, 0)
    )
    return WaitAnalysis(seen, age_s, busy, PeerWait("barrier", None) if waits else None)


@pytest.mark.parametrize(
    ("longest_s", "expected"), [({}, 10 * S), ({"DATA": 0.1}, S), ({"DATA": 8.0}, 80.0), ({"SAVING": 8.0}, 10 * S)]
)
def test_a_limit_follows_how_long_the_phase_has_taken(longest_s: dict[str, float], expected: float) -> None:
    assert limits(**longest_s).of(beat(Phase.DATA)) == expected


def test_a_limit_remembers_the_slowest_rank_of_all_attempts() -> None:
    known = limits(DATA=8.0)
    known.learn(beat(Phase.DATA, 5, {Phase.DATA: 1.0}))
    assert known.of(beat(Phase.DATA)) == 80.0


def test_a_script_has_ten_times_as_long_before_its_first_step() -> None:
    known = limits(SCRIPT=0.1)
    assert known.of(beat(Phase.SCRIPT, 0)) == 10 * S
    assert known.of(beat(Phase.SCRIPT, 1)) == S


KNOWN = limits(DATA=0.1, COMPUTING=0.1, EXCHANGING=0.1, SCRIPT=0.1)
WAITS = rank(0, Phase.EXCHANGING, 50, waits=True)


@pytest.mark.parametrize(
    ("other", "hung"),
    [
        (rank(1, Phase.COMPUTING, 31), {1}),
        (rank(1, Phase.COMPUTING, 29), None),  # still within its limit, however long others wait
        (rank(1, Phase.COMPUTING, 299, busy=True), None),
        (rank(1, Phase.COMPUTING, 301, busy=True), {1}),
        (rank(1, Phase.SAVING, 299), None),  # no rank has completed a save yet
        (rank(1, Phase.SAVING, 301), {1}),
        (rank(1, Phase.SAVING, 31, state="T"), {1}),  # a stopped rank is not slow
        (rank(1, Phase.COMPUTING, 3000, state="t"), None),  # a debugger traces it
        (rank(1, Phase.EXCHANGING, 31, waits=True), set()),
        (rank(1, Phase.EXCHANGING, 29, waits=True), None),
        (rank(1, Phase.LEAVING, 1, state="ended"), set()),
        (rank(1, Phase.SCRIPT, 301, step=0), {1}),  # another rank waits for it
    ],
)
def test_overdue_ranks_while_another_rank_waits(other: WaitAnalysis, hung: set[int] | None) -> None:
    assert find_hung_ranks([WAITS, other], KNOWN, is_one_machine=True) == hung


@pytest.mark.parametrize(
    ("alone", "hung"),
    [
        (rank(0, Phase.SCRIPT, 5000, step=0), None),  # a script that does not train may take any time
        (rank(0, Phase.SCRIPT, 31, step=3), {0}),
        (rank(0, Phase.LEAVING, 5000, state="ended"), None),
        (rank(0, Phase.DATA, 31), {0}),
    ],
)
def test_overdue_ranks_while_no_rank_waits(alone: WaitAnalysis, hung: set[int] | None) -> None:
    assert find_hung_ranks([alone], KNOWN, is_one_machine=True) == hung


def test_ranks_that_wait_for_another_machine_are_reported_later() -> None:
    assert find_hung_ranks([WAITS], KNOWN, is_one_machine=False) is None
    assert find_hung_ranks([rank(0, Phase.EXCHANGING, 61, waits=True)], KNOWN, is_one_machine=False) == set()


def test_after_a_pause_of_the_agent_the_time_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that was asleep, or a job that a scheduler suspended, is no hang."""
    now = time.monotonic()
    detector = HangDetector(1.0, lambda number: RankFiles(tmp_path, number), lambda _: None)
    heartbeat = beat(Phase.DATA)._replace(since=now, longest_s={Phase.DATA: 0.1})
    ranks = [RankStatus(0, 2**22 + 1, None, heartbeat)]  # no process has that number
    probes = []
    monkeypatch.setattr("lockstep.supervision.hang_detector.probe_ranks", lambda *_: probes.append(1) or [])
    for later_s, num_probes in ((0.1, 0), (3600.0, 0), (3600.5, 0), (3601.5, 1)):
        monkeypatch.setattr("lockstep.supervision.hang_detector.time.monotonic", lambda at=now + later_s: at)
        detector.poll(ranks, lambda: FailureContext(1))
        assert len(probes) == num_probes, later_s
