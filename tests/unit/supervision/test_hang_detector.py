"""Which ranks are overdue, and which are merely slow, busy or waiting."""

import time
from pathlib import Path

import pytest

from lockstep.supervision.agent_folder import RankFiles
from lockstep.supervision.cpu_activity import CpuActivity
from lockstep.supervision.failure_report import FailureContext
from lockstep.supervision.flight_recorder import Collective
from lockstep.supervision.hang_detector import HangDetector, PhaseLimits, find_hung_ranks, has_passed_stop_limit
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
    number: int,
    phase: Phase,
    age_s: float,
    *,
    step: int = 5,
    busy: bool = False,
    waits: bool = False,
    state: str = "S",
    collectives: int = 0,
) -> WaitAnalysis:
    exit_code = 0 if state == "ended" else None
    known = {Phase.COMPUTING: 1.0} if phase != Phase.SCRIPT else {}
    seen = RankObservation(
        number, exit_code, beat(phase, step, known), age_s, ProcessState(1, "python", state[0], 0.0, 0, 0)
    )
    idle_s = 0.0 if busy else age_s
    return WaitAnalysis(seen, age_s, idle_s, busy, PeerWait("barrier", None) if waits else None, collectives)


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
        (rank(1, Phase.COMPUTING, 3000, state="t"), None),  # a debugger traces it
        (rank(1, Phase.EXCHANGING, 31, waits=True), set()),
        (rank(1, Phase.EXCHANGING, 29, waits=True), None),
        (rank(1, Phase.LEAVING, 1, state="ended"), set()),
        (rank(1, Phase.SCRIPT, 301, step=0), {1}),  # another rank waits for it
        (rank(1, Phase.SCRIPT, 31, step=0, collectives=2), None),  # it is still being set up
        (rank(1, Phase.SCRIPT, 31, step=0, collectives=3), {1}),
    ],
)
def test_overdue_ranks_while_another_rank_waits(other: WaitAnalysis, hung: set[int] | None) -> None:
    assert find_hung_ranks([WAITS, other], KNOWN, is_one_machine=True) == hung


@pytest.mark.parametrize(
    ("alone", "hung"),
    [
        (rank(0, Phase.SCRIPT, 5000, step=0), None),  # a script that does not train may take any time
        (rank(0, Phase.SCRIPT, 31, step=0, collectives=3), {0}),
        (rank(0, Phase.SCRIPT, 31, step=3), {0}),
        (rank(0, Phase.LEAVING, 5000, state="ended"), None),
        (rank(0, Phase.DATA, 31), {0}),
    ],
)
def test_overdue_ranks_while_no_rank_waits(alone: WaitAnalysis, hung: set[int] | None) -> None:
    assert find_hung_ranks([alone], KNOWN, is_one_machine=True) == hung


def test_pauses_that_were_reported_and_ended_are_known() -> None:
    known = PhaseLimits(S)
    assert known.of(beat(Phase.SCRIPT, 0), 3) == S
    known.learn_pause(40.0)
    assert (known.of(beat(Phase.SCRIPT, 0), 3), known.of(beat(Phase.SCRIPT, 0), 2)) == (400.0, 10 * S)


@pytest.mark.parametrize(
    ("other", "hung", "ends"),
    [
        (rank(1, Phase.COMPUTING, 1801), {1}, True),
        (rank(1, Phase.COMPUTING, 1799), {1}, False),
        (rank(1, Phase.COMPUTING, 1801, busy=True), {1}, False),
        (rank(1, Phase.COMPUTING, 18001, busy=True), {1}, True),
        (rank(1, Phase.EXCHANGING, 1801, waits=True), set(), True),
        (rank(1, Phase.EXCHANGING, 1799, waits=True), set(), False),
        (rank(1, Phase.EXCHANGING, 1801, waits=True, busy=True), set(), True),  # it spins until a GPU is done
    ],
)
def test_ranks_that_may_be_healthy_end_after_the_stop_limit(other: WaitAnalysis, hung: set[int], ends: bool) -> None:
    waits = rank(0, Phase.EXCHANGING, 5000, waits=True)
    assert has_passed_stop_limit([waits, other], hung, KNOWN, 1800.0) == ends


def test_a_script_that_does_not_train_and_that_no_rank_waits_for_never_ends() -> None:
    alone = rank(0, Phase.SCRIPT, 90000, step=0, collectives=3)
    assert not has_passed_stop_limit([alone], {0}, KNOWN, 1800.0)
    assert has_passed_stop_limit([rank(0, Phase.SCRIPT, 90000, step=3)], {0}, KNOWN, 1800.0)


def test_ranks_that_wait_for_another_machine_are_reported_later() -> None:
    assert find_hung_ranks([WAITS], KNOWN, is_one_machine=False) is None
    assert find_hung_ranks([rank(0, Phase.EXCHANGING, 61, waits=True)], KNOWN, is_one_machine=False) == set()


def test_the_time_counts_from_the_last_use_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that computes for seven seconds and then waits, as it does for a download, is reported a second later."""
    began = time.monotonic()
    detector = HangDetector(1.0, lambda number: RankFiles(tmp_path, number), lambda _: None)
    heartbeat = beat(Phase.DATA)._replace(since=began, longest_s={Phase.DATA: 0.1})
    ranks = [RankStatus(0, 1, None, heartbeat)]
    now = began

    def probe(*_: object) -> list[RankObservation]:
        return [RankObservation(0, None, heartbeat, now, ProcessState(1, "python", "S", 0.0, 0, 0))]

    monkeypatch.setattr("lockstep.supervision.hang_detector.probe_ranks", probe)
    monkeypatch.setattr("lockstep.supervision.hang_detector.time.monotonic", lambda: now)
    detector._activity = CpuActivity(lambda _: min(now - began, 7.0))
    reported = []
    for tenth in range(150):
        now = began + tenth / 10
        if (report := detector.poll(ranks, lambda: FailureContext(1))) is not None:
            assert not report.must_end
            reported.append(tenth / 10)
    assert len(reported) == 1
    assert 8 < reported[0] <= 13


def test_a_collective_that_begins_or_ends_is_progress(tmp_path: Path) -> None:
    detector = HangDetector(1.0, lambda number: RankFiles(tmp_path, number), lambda _: None)
    heartbeat = beat(Phase.SCRIPT, 0)
    detector._started_at -= 100
    began = time.time() - 50
    reduce = Collective(3, "0", "all_reduce", "[[3]]", False, "gloo", began)
    detector._note_collectives(0, [reduce])
    progress_at = detector._progress_at(0, heartbeat)
    assert time.monotonic() - progress_at == pytest.approx(50, abs=1)
    detector._note_collectives(0, [reduce])
    assert detector._progress_at(0, heartbeat) == progress_at, "the same to the last bit"
    detector._note_collectives(0, [reduce._replace(is_done=True)])
    assert time.monotonic() - detector._progress_at(0, heartbeat) == pytest.approx(0, abs=1)
    detector._note_collectives(0, [Collective(1, "1", "barrier", "[]", False, "gloo", began + 20)])
    assert time.monotonic() - detector._progress_at(0, heartbeat) == pytest.approx(30, abs=1)
    assert detector._num_collectives == {0: 3}, "another group's count begins anew"


def test_a_report_says_when_the_job_ends_only_if_it_does(tmp_path: Path) -> None:
    detector = HangDetector(1.0, lambda number: RankFiles(tmp_path, number), lambda _: None, stop_limit_s=1800.0)
    for step, ends in ((0, False), (3, True)):
        report = detector._report([rank(0, Phase.SCRIPT, 50, step=step, collectives=3)], {0}, False, FailureContext(1))
        assert report is not None
        assert ("The job ends only after 1800 s" in report.verdict.messages[0]) == ends
        detector.begin()


def test_a_rank_is_reported_by_itself_after_another_one_was(tmp_path: Path) -> None:
    detector = HangDetector(1.0, lambda number: RankFiles(tmp_path, number), lambda _: None)
    first, second = rank(0, Phase.COMPUTING, 300), rank(1, Phase.COMPUTING, 31)
    assert detector._report([first, second], {0}, False, FailureContext(2)) is not None
    assert detector._report([first, second], {0}, False, FailureContext(2)) is None
    assert detector._report([first, second], {1}, False, FailureContext(2)) is not None


def test_the_time_that_the_machine_was_asleep_is_not_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    detector = HangDetector(1.0, lambda number: RankFiles(tmp_path, number), lambda _: None)
    paused = rank(0, Phase.SCRIPT, 50, step=0, collectives=3)
    detector._report([paused], {0}, False, FailureContext(1))
    now = time.monotonic() + 3600
    monkeypatch.setattr("lockstep.supervision.hang_detector.time.monotonic", lambda: now)
    detector.poll([RankStatus(0, 2**22 + 1, None, paused.now.heartbeat)], lambda: FailureContext(1))
    assert detector._limits.of(paused.now.heartbeat, 3) == 1.0


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
