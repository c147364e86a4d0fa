"""The cause is distinguished from its victims by how each rank ended, not by which printed most."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.supervision.collective_mismatch import CollectiveMismatch
from lockstep.supervision.failure_report import (
    ErrorReport,
    FailureContext,
    RankExit,
    aborted_rank,
    explain_failure,
    has_only_victims,
    read_error_report,
    write_incident,
)
from lockstep.supervision.heartbeat import DataWorker, Heartbeat, Phase


def raised(error: str, time: float = 1.0, *, communication: bool = False, deliberate: bool = False) -> ErrorReport:
    return ErrorReport(time, error, f"Traceback of {error}", deliberate, 2 if deliberate else None, communication)


def explained(exits: list[RankExit], world_size: int) -> str:
    return "\n".join(explain_failure(exits, FailureContext(world_size)).messages)


LOST = raised("RuntimeError: Connection closed by peer", 0.5, communication=True)


def test_an_exception_is_the_cause_and_the_rest_are_victims_in_one_line() -> None:
    verdict = explain_failure(
        [RankExit(0, 1, LOST), RankExit(1, 1, raised("ValueError: planted")), RankExit(2, None)], FailureContext(3)
    )
    lines = verdict.messages[0].splitlines()
    assert lines[0] == "rank 1 of 3 failed, the cause: ValueError: planted"
    assert lines[1] == "Traceback of ValueError: planted"
    assert lines[-1] == "its victims: rank 0 (lost contact), rank 2 (stopped)"
    assert verdict.exit_code == 3


def test_the_earliest_exception_wins() -> None:
    exits = [RankExit(0, 1, raised("ValueError: later", 2.0)), RankExit(1, None, raised("ValueError: first", 1.0))]
    assert "rank 1 of 2 failed, the cause: ValueError: first" in explained(exits, 2)


def test_a_killed_rank_is_the_cause_though_only_its_victim_wrote_a_report() -> None:
    text = explained([RankExit(0, 1, LOST), RankExit(1, -9)], 2)
    assert text.startswith("rank 1 of 2 failed, the cause: killed by SIGKILL")


def test_of_two_killed_ranks_the_one_that_was_at_work_is_the_cause() -> None:
    """The kernel may kill several for lack of memory; those that only waited have not used it up."""
    waiting, computing = (
        Heartbeat(7, 7, 3, phase, 0.0, None, False, False, {}, []) for phase in (Phase.EXCHANGING, Phase.COMPUTING)
    )
    text = explained([RankExit(0, -9, heartbeat=waiting), RankExit(1, -9, heartbeat=computing)], 2)
    assert text.startswith("rank 1 of 2 failed")
    assert "its victims: rank 0 (ended by SIGKILL)" in text


def test_an_abort_is_suspected_less_than_an_exception() -> None:
    text = explained([RankExit(0, -6), RankExit(1, 1, raised("KeyError: 'x'"))], 2)
    assert "cause: KeyError: 'x'" in text
    assert "rank 0 (ended by SIGABRT)" in text


def test_a_rank_that_skipped_a_collective_is_the_cause_when_gloo_aborts_another() -> None:
    exits = [RankExit(0, -6), RankExit(1, None), RankExit(2, 1, LOST)]
    assert aborted_rank(exits) == 0
    found = CollectiveMismatch((1,), "skipped the barrier")
    verdict = explain_failure(exits, FailureContext(3, "node7"), found)
    assert verdict.messages[0].startswith(
        "rank 1 of 3 on node7, the cause: it skipped the barrier, according to torch's"
    )
    assert (
        "gloo seems to have aborted rank 0 (killed by SIGABRT), which received its data in another collective"
        in verdict.messages[0]
    )
    assert (verdict.rank, verdict.victims, verdict.exit_code) == (1, (0, 2), 3)
    heading = explain_failure(exits, FailureContext(3)).messages[0].splitlines()[0]
    assert heading.startswith("rank 0 of 3 failed, the cause: killed by SIGABRT (if gloo wrote `op.preamble.length")
    assert aborted_rank([RankExit(0, -6), RankExit(1, 1, raised("ValueError: planted"))]) is None


def test_a_rank_that_left_early_is_named() -> None:
    text = explained([RankExit(0, 1, LOST), RankExit(1, 0)], 2)
    assert text.startswith("rank 1 of 2 failed, the cause: it finished early")


@pytest.mark.parametrize(
    "torch_says",
    ["(pid 43) is killed by signal: Killed", "(pid(s) 43, 44) exited unexpectedly", "(pid 43) has died (SIGKILL)"],
)
def test_a_dead_data_worker_is_named_with_its_sample_however_torch_came_to_know(torch_says: str) -> None:
    workers = [DataWorker(number, 42 + number, 20 + number, 0.0) for number in range(3)]
    heartbeat = Heartbeat(7, 7, 3, Phase.DATA, 0.0, None, False, False, {}, workers)
    text = explained([RankExit(0, 1, raised(f"RuntimeError: DataLoader worker {torch_says}"), heartbeat)], 1)
    assert "data worker 1, reading sample 21" in text
    assert ("data worker 2, reading sample 22" in text) == ("44" in torch_says)
    assert "data worker 0" not in text


def test_a_connection_lost_to_a_data_worker_is_described_as_that() -> None:
    lost = raised("ConnectionResetError: [Errno 104] Connection reset by peer")
    in_loader = replace(lost, traceback=f'File "torch/utils/data/dataloader.py", line 1\n{lost.error}')
    assert "reset by peer (to a data worker, which may have died)" in explained([RankExit(0, 1, in_loader)], 1)
    assert "data worker" not in explained([RankExit(0, 1, lost)], 1)
    theirs = replace(
        in_loader, error="ConnectionResetError: Caught ConnectionResetError in DataLoader worker process 0."
    )
    assert "may have died" not in explained([RankExit(0, 1, theirs)], 1)


def test_a_data_worker_that_was_killed_says_nothing_about_the_next_attempt() -> None:
    killed = "RuntimeError: DataLoader worker (pid 43) is killed by signal: Killed."
    raised_later = raised("RuntimeError: DataLoader worker (pid(s) 43) exited unexpectedly")
    chained = replace(
        raised_later, traceback=f"{killed}\nThe above exception was the direct cause of …\n{raised_later.error}"
    )
    assert explain_failure([RankExit(0, 1, raised(killed))], FailureContext(1)).is_from_outside
    assert explain_failure(
        [RankExit(0, 1, raised("RuntimeError: DataLoader worker (pid 43) has died (SIGKILL)"))], FailureContext(1)
    ).is_from_outside
    assert explain_failure([RankExit(0, 1, chained)], FailureContext(1)).is_from_outside
    assert not explain_failure([RankExit(0, 1, chained)], FailureContext(1, out_of_memory=True)).is_from_outside
    crashed = "RuntimeError: DataLoader worker (pid 43) is killed by signal: Segmentation fault."
    assert not explain_failure([RankExit(0, 1, raised(crashed))], FailureContext(1)).is_from_outside


def test_an_exit_code_without_a_report() -> None:
    assert "rank 0 of 2 failed, the cause: exited with code 7" in explained([RankExit(0, 7), RankExit(1, None)], 2)


def test_a_deliberate_error_is_printed_once_without_a_traceback() -> None:
    refused = raised("UserError: runs/a is taken", deliberate=True)
    verdict = explain_failure([RankExit(0, 1, refused), RankExit(1, 1, refused)], FailureContext(2))
    assert verdict.messages == ["runs/a is taken"]
    assert verdict.exit_code == 2
    assert explained([RankExit(0, 1, refused), RankExit(1, None)], 2) == "rank 0: runs/a is taken"


def test_unreadable_reports_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json"
    assert read_error_report(path) is None
    for content in (b"", b"{", b"[]", b'{"time": 1}', b"\xff", b'{"exec": 1}'):
        path.write_bytes(content)
        assert read_error_report(path) is None


def test_victims_alone_mean_that_the_cause_has_not_ended_yet() -> None:
    assert has_only_victims([RankExit(0, 1, LOST), RankExit(1, None)])
    assert not has_only_victims([RankExit(0, 1, LOST), RankExit(1, 7)])
    assert not has_only_victims([RankExit(0, 1, LOST), RankExit(1, None, raised("ValueError: planted"))])
    assert not has_only_victims([RankExit(0, 1, LOST), RankExit(1, 1, LOST)])


def test_a_finished_rank_is_no_victim() -> None:
    assert "victim" not in explained([RankExit(0, 0), RankExit(1, 7)], 2)


def test_no_rank_here_is_blamed_for_a_cause_on_another_machine() -> None:
    exits = [RankExit(0, 1, LOST), RankExit(1, None)]
    assert explained(exits, 4) == "ranks 0, 1 of 4: victims of a rank on another machine; see its output"
    assert "rank 1 of 4 failed, the cause: exited with code 7" in explained([RankExit(0, 1, LOST), RankExit(1, 7)], 4)


def test_an_error_of_many_lines_is_quoted_by_its_first() -> None:
    exits = [RankExit(0, 1, raised("ValueError: first\nsecond", 1)), RankExit(1, 1, raised("KeyError: a\nb", 2))]
    lines = explained(exits, 2).splitlines()
    assert lines[0].endswith("the cause: ValueError: first")
    assert lines[-1] == "its victims: rank 1 (then raised KeyError: a)"


@pytest.mark.parametrize("phase", [Phase.JOINING, Phase.SCRIPT])
@pytest.mark.parametrize("report", [None, LOST])
def test_an_error_before_the_first_step_is_every_ranks(phase: Phase, report: ErrorReport | None) -> None:
    refused = RankExit(0, 1, raised("UserError: data.path=x: no such file", deliberate=True))
    late = Heartbeat(7, 7, 0, phase, 0.0, None, False, False, {}, [])
    assert explained([refused, RankExit(1, None, report, late)], 2) == "data.path=x: no such file"
    for other in (late._replace(step=3), late._replace(phase=Phase.COMPUTING)):
        assert explained([refused, RankExit(1, None, report, other)], 2) == "rank 0: data.path=x: no such file"


@pytest.mark.parametrize(
    ("step", "phase", "place"),
    [
        (0, Phase.SCRIPT, ""),
        (0, Phase.JOINING, " while joining the other ranks"),
        (0, Phase.EVALUATING, " while evaluating"),
        (0, Phase.COMPUTING, " in step 1 (forward and backward pass)"),
        (4, Phase.EVALUATING, " after step 4 (evaluating)"),
        (4, Phase.SCRIPT, " after step 4 (the script's own code)"),
        (4, Phase.DESIGNS, " in generation 5 (evaluating designs)"),
    ],
)
def test_the_place_of_a_failure(step: int, phase: Phase, place: str) -> None:
    last = Heartbeat(7, 7, step, phase, 0.0, None, False, False, {}, [])
    text = explained([RankExit(0, 7, heartbeat=last)], 1)
    assert text.startswith(f"rank 0 of 1 failed{place}, the cause: ")


def test_what_a_script_does_inside_a_step_belongs_to_it() -> None:
    last = Heartbeat(7, 7, 4, Phase.EVALUATING, 0.0, None, False, False, {}, [], is_in_step=True)
    text = explained([RankExit(0, 7, heartbeat=last)], 1)
    assert text.startswith("rank 0 of 1 failed in step 5 (evaluating), the cause: ")


def test_a_deliberate_error_without_a_message_is_named() -> None:
    assert explained([RankExit(0, 1, raised("UserError: ", deliberate=True))], 1) == "UserError"


def test_a_deliberate_error_of_many_lines_is_printed_line_by_line() -> None:
    end = RankExit(0, 1, raised("UserError: refused\n  optim.lr: 1 → 2", deliberate=True))
    assert explain_failure([end], FailureContext(1)).messages == ["refused", "  optim.lr: 1 → 2"]
    named = raised("WorldError: rank 0 cannot reach", deliberate=True)
    assert explain_failure([RankExit(0, 1, named), RankExit(1, None)], FailureContext(2)).messages == [
        "rank 0 cannot reach"
    ]


def test_a_rank_that_was_asked_to_stop_is_not_a_failure() -> None:
    verdict = explain_failure([RankExit(0, 1, LOST), RankExit(1, 143)], FailureContext(2))
    assert (verdict.exit_code, verdict.is_final) == (143, True)
    assert verdict.messages == ["rank 1 was asked to stop (SIGTERM), and saved nothing"]


def test_a_cause_can_be_passed_to_the_next_attempt() -> None:
    """It becomes an environment variable, which holds neither zero bytes nor lone surrogates."""
    cause = explain_failure([RankExit(0, 1, raised("ValueError: \0 \ud800\nmore"))], FailureContext(1)).cause
    assert cause == "ValueError: \\0 \\ud800"


def test_an_incident_may_contain_lone_surrogates(tmp_path: Path) -> None:
    path = write_incident(tmp_path, "crash", "no such file: caf\udce9 →", {"cause": "\udce9"})
    assert path.read_text() == "no such file: caf\\udce9 →\n"
    assert json.loads(path.with_suffix(".json").read_text())["cause"] == "\udce9"
