"""Hang reports, from observations like those of real hangs."""

from lockstep.supervision.failure_report import FailureContext
from lockstep.supervision.hang_report import HangReport, Outlook, explain_hang
from lockstep.supervision.heartbeat import DataWorker, Phase
from lockstep.supervision.linux_processes import ProcessState
from lockstep.supervision.rank_probe import ChildProcess, RankObservation
from lockstep.supervision.stack_dumps import StackFrame
from lockstep.supervision.wait_analysis import analyze_wait
from tests.unit.supervision.observations import calls, recorded, seen


def explained(ranks: list[RankObservation], hung: list[RankObservation], context: FailureContext) -> HangReport:
    analyzed = [analyze_wait(each, each, 42.0, 42.0, world_size=context.world_size) for each in ranks]
    return explain_hang(analyzed, [each.rank for each in hung], context)


def message(hang: HangReport) -> str:
    (message,) = hang.verdict.messages
    return message


def test_the_hung_rank_comes_first_then_the_ranks_that_wait_for_it() -> None:
    hung = seen(1, StackFrame("/usr/lib/x.py", 3, "recv"), StackFrame("train.py", 7, "fetch"))
    others = [seen(0, *calls("all_reduce", 9)), seen(2, *calls("all_reduce", 9)), seen(3, phase=Phase.EXCHANGING)]
    hang = explained([*others, hung], [hung], FailureContext(4, "host"))
    assert message(hang).startswith(
        "rank 1 of 4 on host has been stuck in step 6 (forward and backward pass) for 42 s: it waits or sleeps at "
    )
    assert "Ranks 0, 2 wait for it in all_reduce at train.py:9; rank 3 waits for it in the gradient exch" in message(
        hang
    )
    assert (hang.verdict.exit_code, hang.verdict.rank, hang.verdict.victims) == (5, 1, (0, 2, 3))


def test_a_rank_that_may_be_healthy_is_not_called_stuck() -> None:
    hung = seen(0, StackFrame("train.py", 7, "fetch"))
    analyzed = [analyze_wait(hung, hung, 42.0, 42.0, world_size=1)]
    words = {
        Outlook(is_certain=False): "--hang-limit sets when this is reported",
        Outlook(
            is_certain=False, stop_limit_s=1800.0
        ): "The job ends only after 1800 s without a sign of life (--hang-s",
        Outlook(is_certain=False, is_over=True, stop_limit_s=40.0): "The job ends, after more than 40 s without a sign",
    }
    for outlook, expected in words.items():
        text = message(explain_hang(analyzed, {0}, FailureContext(1), outlook))
        assert text.startswith("rank 0 of 1 has made no progress in step 6 (forward and backward pass) for 42 s: it ")
        assert expected in text


def test_the_data_worker_that_has_read_for_the_longest_is_named() -> None:
    def worker(number: int, sample: int | None, since: float) -> ChildProcess:
        state = ProcessState(200 + number, "python", "S", 0.0, number, 0)
        frames = (StackFrame("data.py", 30 + number, "__getitem__"),)
        return ChildProcess(200 + number, state, "", frames, "", DataWorker(number, 200 + number, sample, since))

    hung = seen(0, phase=Phase.DATA, children=(worker(0, None, 1.0), worker(1, 8, 4.0), worker(2, 9, 3.0)))
    hang = explained([hung], [hung], FailureContext(1))
    assert "data worker 2 (pid 202), which makes no progress, reading sample 9, at data.py:32" in message(hang)
    assert (hang.facts["worker"], hang.facts["sample"], hang.facts["line"]) == (2, 9, 32)


def test_the_flight_recorder_shows_which_rank_left_the_common_order() -> None:
    """Two ranks in different collectives: only what they did before shows which of them is wrong."""
    common = ("all_reduce", "barrier") * 3
    at_barrier = seen(0, *calls("barrier", 9), collectives=recorded(*common, "barrier"))
    at_reduce = seen(1, *calls("all_reduce", 8), collectives=recorded(*common, "all_reduce"))
    hang = explained([at_barrier, at_reduce], [], FailureContext(2))
    assert "rank 0 skipped the all_reduce of [[3]] that the other ranks call" in message(hang)
    assert (hang.verdict.rank, hang.facts["line"]) == (0, 9)
    at_gather = seen(1, *calls("gather", 8), collectives=recorded(*common, "gather"))
    at_reduce = at_reduce._replace(rank=0)
    assert explained([at_reduce, at_gather], [], FailureContext(2)).verdict.rank == 1


def test_a_rank_that_never_came_to_a_collective_has_skipped_it() -> None:
    waits = seen(0, *calls("all_reduce", 8), collectives=recorded(*["all_reduce"] * 4))
    ahead = seen(
        1, StackFrame("train.py", 11, "main"), phase=Phase.EXCHANGING, collectives=recorded(*["all_reduce"] * 3)
    )
    hang = explained([waits, ahead], [], FailureContext(2))
    assert "rank 1 skipped the all_reduce" in message(hang)
    assert hang.verdict.rank == 1


def test_without_a_flight_recorder_the_majority_is_right() -> None:
    ranks = [seen(0, *calls("barrier", 9)), seen(1, *calls("all_reduce", 8)), seen(2, *calls("barrier", 9))]
    hang = explained(ranks, [], FailureContext(3))
    assert "Rank 1 seems to have called different collectives than the others" in message(hang)
    assert hang.verdict.rank == 1


def test_no_rank_is_blamed_if_all_are_at_the_same_place() -> None:
    hang = explained([seen(0, *calls("barrier", 9)), seen(1, *calls("barrier", 9))], [], FailureContext(2))
    assert "all 2 ranks have been waiting in the same collective" in message(hang)
    assert hang.verdict.rank is None


def test_ranks_of_this_machine_wait_for_another_machine() -> None:
    hang = explained([seen(0, *calls("barrier", 9))], [], FailureContext(2, "host"))
    assert "waiting for a rank on another machine" in message(hang)
    assert hang.verdict.rank is None
