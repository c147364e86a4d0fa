"""The cause is told from its victims by how each rank ended, not by who was loudest."""

from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.supervision.failure import RankEnd, Report, Scene, explain, only_victims, read_report
from lockstep.supervision.pulse import DataWorker, Phase, Reading


def raised(error: str, time: float = 1.0, *, communication: bool = False, deliberate: bool = False) -> Report:
    return Report(time, error, f"Traceback of {error}", deliberate, 2 if deliberate else None, communication)


def told(ends: list[RankEnd], world_size: int) -> str:
    return "\n".join(explain(ends, Scene(world_size)).messages)


LOST = raised("RuntimeError: Connection closed by peer", 0.5, communication=True)


def test_an_exception_is_the_cause_and_the_rest_are_victims_in_one_line() -> None:
    verdict = explain([RankEnd(0, 1, LOST), RankEnd(1, 1, raised("ValueError: planted")), RankEnd(2, None)], Scene(3))
    lines = verdict.messages[0].splitlines()
    assert lines[0] == "rank 1 of 3 failed, the cause: ValueError: planted"
    assert lines[1] == "Traceback of ValueError: planted"
    assert lines[-1] == "its victims: rank 0 (lost contact), rank 2 (stopped)"
    assert verdict.exit_code == 3


def test_the_earliest_exception_wins() -> None:
    ends = [RankEnd(0, 1, raised("ValueError: later", 2.0)), RankEnd(1, None, raised("ValueError: first", 1.0))]
    assert "rank 1 of 2 failed, the cause: ValueError: first" in told(ends, 2)


def test_a_killed_rank_is_the_cause_though_only_its_victim_left_word() -> None:
    text = told([RankEnd(0, 1, LOST), RankEnd(1, -9)], 2)
    assert text.startswith("rank 1 of 2 failed, the cause: killed by SIGKILL")


def test_an_abort_is_suspected_less_than_an_exception() -> None:
    text = told([RankEnd(0, -6), RankEnd(1, 1, raised("KeyError: 'x'"))], 2)
    assert "cause: KeyError: 'x'" in text
    assert "rank 0 (ended by SIGABRT)" in text


def test_a_rank_that_left_early_is_named() -> None:
    text = told([RankEnd(0, 1, LOST), RankEnd(1, 0)], 2)
    assert text.startswith("rank 1 of 2 failed, the cause: it finished early")


@pytest.mark.parametrize(
    "torch_says",
    ["(pid 43) is killed by signal: Killed", "(pid(s) 43, 44) exited unexpectedly", "(pid 43) has died (SIGKILL)"],
)
def test_a_dead_data_worker_is_named_with_its_sample_however_torch_came_to_know(torch_says: str) -> None:
    workers = [DataWorker(number, 42 + number, 20 + number, 0.0) for number in range(3)]
    pulse = Reading(7, 7, 3, Phase.DATA, 0.0, None, False, False, {}, workers)
    text = told([RankEnd(0, 1, raised(f"RuntimeError: DataLoader worker {torch_says}"), pulse)], 1)
    assert "data worker 1, reading sample 21" in text
    assert ("data worker 2, reading sample 22" in text) == ("44" in torch_says)
    assert "data worker 0" not in text


def test_a_connection_lost_to_a_data_worker_is_told_as_that() -> None:
    lost = raised("ConnectionResetError: [Errno 104] Connection reset by peer")
    in_loader = replace(lost, traceback=f'File "torch/utils/data/dataloader.py", line 1\n{lost.error}')
    assert "reset by peer (to a data worker, which may have died)" in told([RankEnd(0, 1, in_loader)], 1)
    assert "data worker" not in told([RankEnd(0, 1, lost)], 1)
    theirs = replace(
        in_loader, error="ConnectionResetError: Caught ConnectionResetError in DataLoader worker process 0."
    )
    assert "may have died" not in told([RankEnd(0, 1, theirs)], 1)


def test_a_data_worker_that_was_killed_says_nothing_about_the_next_attempt() -> None:
    killed = "RuntimeError: DataLoader worker (pid 43) is killed by signal: Killed."
    raised_later = raised("RuntimeError: DataLoader worker (pid(s) 43) exited unexpectedly")
    chained = replace(
        raised_later, traceback=f"{killed}\nThe above exception was the direct cause of …\n{raised_later.error}"
    )
    assert explain([RankEnd(0, 1, raised(killed))], Scene(1)).is_from_outside
    assert explain(
        [RankEnd(0, 1, raised("RuntimeError: DataLoader worker (pid 43) has died (SIGKILL)"))], Scene(1)
    ).is_from_outside
    assert explain([RankEnd(0, 1, chained)], Scene(1)).is_from_outside
    assert not explain([RankEnd(0, 1, chained)], Scene(1, out_of_memory=True)).is_from_outside
    crashed = "RuntimeError: DataLoader worker (pid 43) is killed by signal: Segmentation fault."
    assert not explain([RankEnd(0, 1, raised(crashed))], Scene(1)).is_from_outside


def test_an_exit_code_without_a_word() -> None:
    assert "rank 0 of 2 failed, the cause: exited with code 7" in told([RankEnd(0, 7), RankEnd(1, None)], 2)


def test_a_deliberate_error_is_its_message_alone_and_said_once() -> None:
    refused = raised("UserError: runs/a is taken", deliberate=True)
    verdict = explain([RankEnd(0, 1, refused), RankEnd(1, 1, refused)], Scene(2))
    assert verdict.messages == ["runs/a is taken"]
    assert verdict.exit_code == 2
    assert told([RankEnd(0, 1, refused), RankEnd(1, None)], 2) == "rank 0: runs/a is taken"


def test_reports_are_read_with_suspicion(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json"
    assert read_report(path) is None
    for content in (b"", b"{", b"[]", b'{"time": 1}', b"\xff", b'{"exec": 1}'):
        path.write_bytes(content)
        assert read_report(path) is None


def test_victims_alone_mean_that_the_cause_is_still_to_be_seen() -> None:
    assert only_victims([RankEnd(0, 1, LOST), RankEnd(1, None)])
    assert not only_victims([RankEnd(0, 1, LOST), RankEnd(1, 7)])
    assert not only_victims([RankEnd(0, 1, LOST), RankEnd(1, None, raised("ValueError: planted"))])
    assert not only_victims([RankEnd(0, 1, LOST), RankEnd(1, 1, LOST)])


def test_a_rank_that_was_done_is_no_victim() -> None:
    assert "victim" not in told([RankEnd(0, 0), RankEnd(1, 7)], 2)


def test_where_the_cause_is_on_another_machine_nobody_here_is_blamed() -> None:
    ends = [RankEnd(0, 1, LOST), RankEnd(1, None)]
    assert told(ends, 4) == "rank 0, 1 of 4: victims of a rank on another machine; see there"
    assert "rank 1 of 4 failed, the cause: exited with code 7" in told([RankEnd(0, 1, LOST), RankEnd(1, 7)], 4)


def test_an_error_of_many_lines_is_quoted_by_its_first() -> None:
    ends = [RankEnd(0, 1, raised("ValueError: first\nsecond", 1)), RankEnd(1, 1, raised("KeyError: a\nb", 2))]
    lines = told(ends, 2).splitlines()
    assert lines[0].endswith("the cause: ValueError: first")
    assert lines[-1] == "its victims: rank 1 (then raised KeyError: a)"


@pytest.mark.parametrize("phase", [Phase.JOINING, Phase.SCRIPT])
@pytest.mark.parametrize("report", [None, LOST])
def test_ranks_that_had_not_come_as_far_do_not_make_it_one_ranks_own(phase: Phase, report: Report | None) -> None:
    refused = RankEnd(0, 1, raised("UserError: data.path=x: no such file", deliberate=True))
    late = Reading(7, 7, 0, phase, 0.0, None, False, False, {}, [])
    assert told([refused, RankEnd(1, None, report, late)], 2) == "data.path=x: no such file"
    for other in (late._replace(step=3), late._replace(phase=Phase.COMPUTING)):
        assert told([refused, RankEnd(1, None, report, other)], 2) == "rank 0: data.path=x: no such file"


def test_a_deliberate_error_without_a_word_is_named() -> None:
    assert told([RankEnd(0, 1, raised("UserError: ", deliberate=True))], 1) == "UserError"


def test_a_deliberate_error_of_many_lines_is_said_line_by_line() -> None:
    end = RankEnd(0, 1, raised("UserError: refused\n  optim.lr: 1 → 2", deliberate=True))
    assert explain([end], Scene(1)).messages == ["refused", "  optim.lr: 1 → 2"]
    named = raised("WorldError: rank 0 cannot reach", deliberate=True)
    assert explain([RankEnd(0, 1, named), RankEnd(1, None)], Scene(2)).messages == ["rank 0 cannot reach"]


def test_a_rank_that_was_asked_to_stop_is_not_a_failure() -> None:
    verdict = explain([RankEnd(0, 1, LOST), RankEnd(1, 75)], Scene(2))
    assert (verdict.exit_code, verdict.is_final) == (75, True)
    assert verdict.messages == ["rank 1 was asked to stop before its first step"]


def test_a_cause_can_be_told_to_the_next_attempt() -> None:
    """It becomes a variable of its environment, which holds neither zeros nor what no encoding has."""
    cause = explain([RankEnd(0, 1, raised("ValueError: \0 \ud800\nmore"))], Scene(1)).cause
    assert cause == "ValueError: \\0 \\ud800"
