"""How much memory is available, and whether a snapshot fits."""

import os
from pathlib import Path

from lockstep.checkpoint.available_memory import available_memory_bytes, why_no_room


def test_some_memory_stays_free(tmp_path: Path) -> None:
    system = os.statvfs(tmp_path)
    free = system.f_bavail * system.f_frsize
    assert why_no_room(tmp_path, 1000, available=2001) is None
    problem = why_no_room(tmp_path, 1000, available=1999)
    assert problem == "0.0 MB of memory is available, and 0.0 MB would be more than half of it"
    problem = why_no_room(tmp_path, free, available=4 * free)
    assert problem is not None
    assert problem.startswith(f"{tmp_path} has {free / 1e6:,.1f} MB free")


def test_limits_of_control_groups_count(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text("MemTotal:  90000 kB\nMemAvailable:   80000 kB\n")
    (tmp_path / "self" / "cgroup").write_text("0::/job/one\n")
    assert available_memory_bytes(tmp_path, tmp_path / "groups") == 80000 * 1024
    group = tmp_path / "groups" / "job" / "one"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("3000000\n")
    (group / "memory.max").write_text("max\n")
    assert available_memory_bytes(tmp_path, tmp_path / "groups") == 80000 * 1024
    (group / "memory.max").write_text("5000000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 500000\n")
    assert available_memory_bytes(tmp_path, tmp_path / "groups") == 2_500_000
    (group.parent / "memory.current").write_text("3500000\n")
    (group.parent / "memory.max").write_text("5000000\n")
    assert available_memory_bytes(tmp_path, tmp_path / "groups") == 1_500_000, "the limit of a group above holds too"
    assert available_memory_bytes(tmp_path / "nowhere", tmp_path / "nowhere") is None
