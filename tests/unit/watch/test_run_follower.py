"""When watching a run ends, and with which exit code."""

from pathlib import Path

from lockstep.errors import EXIT_FAILED, EXIT_STOPPED
from lockstep.watch.run_follower import RunFollower
from tests.run_folders import append, event, finished_run, start, timed, write_run


def test_a_finished_run_ends_it_at_once(tmp_path: Path) -> None:
    follower = RunFollower(finished_run(tmp_path / "mine"), patience_s=30)
    assert follower.exit_code(follower.poll(), 0.0) == 0


def test_a_stopped_run_is_waited_for_and_then_given_up(tmp_path: Path) -> None:
    follower = RunFollower(write_run(tmp_path, [start()]), patience_s=30)
    view = follower.poll()
    assert [follower.exit_code(view, now_s) for now_s in (0.0, 29.0, 31.0)] == [None, None, EXIT_STOPPED]
    (tmp_path / "incidents").mkdir()
    (tmp_path / "incidents" / "a.json").write_text('{"t": 1e9, "text": "rank 1 was killed"}')
    assert follower.exit_code(follower.poll(), 32.0) == EXIT_FAILED


def test_a_folder_that_does_not_exist_is_waited_for(tmp_path: Path) -> None:
    follower = RunFollower(tmp_path / "mine", patience_s=0)
    view = follower.poll()
    assert view.status == ("waiting", f"waiting for {tmp_path / 'mine'}")
    assert follower.exit_code(view, 1e9) is None


def test_the_signature_changes_with_the_folder(tmp_path: Path) -> None:
    follower = RunFollower(finished_run(tmp_path / "mine"), 0)
    before = follower.signature()
    assert follower.signature() == before
    append(tmp_path / "mine" / "ranks" / "1.jsonl", [timed(50)])
    after = follower.signature()
    assert after != before
    append(tmp_path / "mine" / "events.jsonl", [event("incident", 40, text="a disk is full")])
    assert follower.signature() != after
