"""The kernel's count of processes it has killed for want of memory."""

from pathlib import Path

from lockstep.supervision.memory import OutOfMemoryKills


def test_a_kill_since_then_is_seen(tmp_path: Path) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\noom 4\noom_kill 3\noom_group_kill 9\n")
    kills = OutOfMemoryKills([tmp_path / "not there", counter])
    assert not kills.any_since()
    counter.write_text("low 0\noom 5\noom_kill 4\noom_group_kill 9\n")
    assert kills.any_since()


def test_where_nothing_is_counted_nothing_is_claimed(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 1\n")
    assert not OutOfMemoryKills([tmp_path / "vmstat", tmp_path / "none"]).any_since()


def test_this_machine_is_asked() -> None:
    assert not OutOfMemoryKills().any_since()
