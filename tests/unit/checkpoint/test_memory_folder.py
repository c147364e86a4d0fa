"""A run's folder in memory: whose it is, and what becomes of those that nobody comes back to."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.checkpoint.memory_folder import MemoryFolder, Unusable, claim, path_in, sweep
from lockstep.checkpoint.memory_room import available_bytes, why_no_room

RUN_ID = "0123456789abcdef"
OTHER_ID = "fedcba9876543210"
OWN = Path("somewhere else")


def make_run(folder: Path, run_id: str = RUN_ID) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"format": 1, "run_id": run_id}))
    return folder


def left_behind(memory: Path, run: Path) -> Path:
    """By an attempt that was killed."""
    folder = claim(path_in(memory, RUN_ID), run)
    (folder.path / "step-3").mkdir()
    folder.release()
    return folder.path


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    return folder


def test_an_attempt_finds_what_the_one_before_has_left(memory: Path, tmp_path: Path) -> None:
    path = left_behind(memory, make_run(tmp_path / "run"))
    folder = claim(path_in(memory, RUN_ID), tmp_path / "run")
    assert folder.path == path == path_in(memory, RUN_ID)
    assert (path / "step-3").is_dir()
    folder.remove()
    assert not list(memory.iterdir())


def test_a_copy_of_the_run_folder_does_not(memory: Path, tmp_path: Path) -> None:
    path = left_behind(memory, make_run(tmp_path / "run"))
    claim(path_in(memory, RUN_ID), make_run(tmp_path / "copy")).release()
    assert sorted(entry.name for entry in path.iterdir()) == [".lock", ".run"]


HOLD = """
import sys
from pathlib import Path
from lockstep.checkpoint.memory_folder import claim
folder = claim(Path(sys.argv[1]), Path(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


def test_one_in_use_is_neither_claimed_nor_swept(memory: Path, tmp_path: Path) -> None:
    path = left_behind(memory, make_run(tmp_path / "run"))
    (tmp_path / "run" / "run.json").unlink()  # so that it would be swept
    command = [sys.executable, "-c", HOLD, str(path), str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(Unusable, match="in use by another process"):
            claim(path_in(memory, RUN_ID), tmp_path / "run")
        sweep(memory, OWN)
        assert (path / "step-3").is_dir()
        holder.communicate("")
    sweep(memory, OWN)
    assert not path.exists()


def test_a_sweep_that_holds_it_for_a_moment_is_waited_for(memory: Path, tmp_path: Path) -> None:
    path = left_behind(memory, make_run(tmp_path / "run"))
    moment = HOLD.replace("sys.stdin.read()", "import time; time.sleep(0.2)")
    command = [sys.executable, "-c", moment, str(path), str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        claim(path_in(memory, RUN_ID), tmp_path / "run").release()
    assert (path / "step-3").is_dir()


def test_those_that_nobody_comes_back_to_are_swept(memory: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    path = left_behind(memory, run)
    stranger = memory / "lockstep-of-somebody"
    stranger.mkdir()
    sweep(memory, OWN)
    assert path.is_dir(), "it may be taken up again"
    make_run(run, OTHER_ID)
    sweep(memory, OWN)
    assert not path.exists(), "another run has its folder now"
    path = left_behind(memory, make_run(run))
    yesterday = time.time() - 25 * 3600
    os.utime(path, (yesterday, yesterday))
    sweep(memory, path)
    assert path.is_dir(), "our own run has come back"
    sweep(memory, OWN)
    assert not path.exists(), "it is too old"
    assert list(memory.iterdir()) == [stranger]


def test_a_sweep_follows_no_link(memory: Path, tmp_path: Path) -> None:
    target = left_behind(memory, make_run(tmp_path / "run")).rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "run.json").unlink()
    path_in(memory, RUN_ID).symlink_to(target)
    sweep(memory, OWN)
    assert (target / "step-3").is_dir()


def test_an_id_is_no_path(memory: Path) -> None:
    with pytest.raises(Unusable, match=r"'\.\./\.\./etc'"):
        path_in(memory, "../../etc")


def test_the_lock_is_let_go_of(memory: Path, tmp_path: Path) -> None:
    folder = claim(path_in(memory, RUN_ID), tmp_path)
    assert isinstance(folder, MemoryFolder)
    folder.release()
    assert folder.lock.closed


def test_room_is_left_for_others(tmp_path: Path) -> None:
    system = os.statvfs(tmp_path)
    free = system.f_bavail * system.f_frsize
    assert why_no_room(tmp_path, 1000, available=2001) is None
    problem = why_no_room(tmp_path, 1000, available=1999)
    assert problem == "0.0 MB of memory are available, and 0.0 MB would be more than half"
    problem = why_no_room(tmp_path, free, available=4 * free)
    assert problem is not None
    assert problem.startswith(f"{tmp_path} has {free / 1e6:,.1f} MB free")


def test_the_control_groups_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text("MemTotal:  90000 kB\nMemAvailable:   80000 kB\n")
    (tmp_path / "self" / "cgroup").write_text("0::/job/one\n")
    assert available_bytes(tmp_path, tmp_path / "groups") == 80000 * 1024
    group = tmp_path / "groups" / "job" / "one"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("3000000\n")
    (group / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path, tmp_path / "groups") == 80000 * 1024
    (group / "memory.max").write_text("5000000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 500000\n")
    assert available_bytes(tmp_path, tmp_path / "groups") == 2_500_000
    (group.parent / "memory.current").write_text("3500000\n")
    (group.parent / "memory.max").write_text("5000000\n")
    assert available_bytes(tmp_path, tmp_path / "groups") == 1_500_000, "a limit above holds too"
    assert available_bytes(tmp_path / "nowhere", tmp_path / "nowhere") is None
