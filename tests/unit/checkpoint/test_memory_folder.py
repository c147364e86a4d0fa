"""A run's folder in memory: who may use it, and when it is removed."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.checkpoint.memory_folder import (
    MemoryFolderError,
    claim_memory_folder,
    memory_folder_path,
    sweep_memory_folders,
)

RUN_ID = "0123456789abcdef"
OTHER_ID = "fedcba9876543210"
OWN = Path("somewhere else")


def make_run(folder: Path, run_id: str = RUN_ID) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"format": 1, "run_id": run_id}))
    return folder


def left_behind(memory: Path, run: Path) -> Path:
    """Leave a folder as a killed attempt would."""
    folder = claim_memory_folder(memory_folder_path(memory, RUN_ID), run)
    (folder.path / "step-3").mkdir()
    folder.release()
    return folder.path


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    return folder


def test_an_attempt_finds_what_the_previous_one_left(memory: Path, tmp_path: Path) -> None:
    path = left_behind(memory, make_run(tmp_path / "run"))
    folder = claim_memory_folder(memory_folder_path(memory, RUN_ID), tmp_path / "run")
    assert folder.path == path == memory_folder_path(memory, RUN_ID)
    assert (path / "step-3").is_dir()
    folder.remove()
    assert not list(memory.iterdir())


def test_a_copied_run_folder_does_not_get_the_original_content(memory: Path, tmp_path: Path) -> None:
    path = left_behind(memory, make_run(tmp_path / "run"))
    claim_memory_folder(memory_folder_path(memory, RUN_ID), make_run(tmp_path / "copy")).release()
    assert sorted(entry.name for entry in path.iterdir()) == [".lock", ".run"]


HOLD = """
import sys
from pathlib import Path
from lockstep.checkpoint.memory_folder import claim_memory_folder
folder = claim_memory_folder(Path(sys.argv[1]), Path(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_folder_in_use_is_neither_claimed_nor_removed(memory: Path, tmp_path: Path) -> None:
    path = left_behind(memory, make_run(tmp_path / "run"))
    (tmp_path / "run" / "run.json").unlink()  # otherwise it would be kept in any case
    command = [sys.executable, "-c", HOLD, str(path), str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(MemoryFolderError, match="in use by another process"):
            claim_memory_folder(memory_folder_path(memory, RUN_ID), tmp_path / "run")
        sweep_memory_folders(memory, OWN)
        assert (path / "step-3").is_dir()
        holder.communicate("")
    sweep_memory_folders(memory, OWN)
    assert not path.exists()


def test_a_lock_that_is_held_for_a_moment_is_waited_for(memory: Path, tmp_path: Path) -> None:
    path = left_behind(memory, make_run(tmp_path / "run"))
    moment = HOLD.replace("sys.stdin.read()", "import time; time.sleep(0.2)")
    command = [sys.executable, "-c", moment, str(path), str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        claim_memory_folder(memory_folder_path(memory, RUN_ID), tmp_path / "run").release()
    assert (path / "step-3").is_dir()


def test_abandoned_folders_are_removed(memory: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    path = left_behind(memory, run)
    stranger = memory / "lockstep-of-somebody"
    stranger.mkdir()
    sweep_memory_folders(memory, OWN)
    assert path.is_dir(), "its run may resume"
    make_run(run, OTHER_ID)
    sweep_memory_folders(memory, OWN)
    assert not path.exists(), "another run uses the run folder now"
    path = left_behind(memory, make_run(run))
    yesterday = time.time() - 25 * 3600
    os.utime(path, (yesterday, yesterday))
    sweep_memory_folders(memory, path)
    assert path.is_dir(), "it is our own"
    sweep_memory_folders(memory, OWN)
    assert not path.exists(), "it is too old"
    path.mkdir(mode=0o700)
    sweep_memory_folders(memory, OWN)
    assert path.is_dir(), "its run may just be creating it"
    minutes_ago = time.time() - 120
    os.utime(path, (minutes_ago, minutes_ago))
    sweep_memory_folders(memory, OWN)
    assert not path.exists(), "its run was killed while it created it"
    assert list(memory.iterdir()) == [stranger]


def test_sweeping_follows_no_link(memory: Path, tmp_path: Path) -> None:
    target = left_behind(memory, make_run(tmp_path / "run")).rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "run.json").unlink()
    memory_folder_path(memory, RUN_ID).symlink_to(target)
    sweep_memory_folders(memory, OWN)
    assert (target / "step-3").is_dir()


def test_a_run_id_cannot_be_a_path(memory: Path) -> None:
    with pytest.raises(MemoryFolderError, match=r"'\.\./\.\./etc'"):
        memory_folder_path(memory, "../../etc")


def test_release_closes_the_lock(memory: Path, tmp_path: Path) -> None:
    folder = claim_memory_folder(memory_folder_path(memory, RUN_ID), tmp_path)
    assert not folder.lock.closed
    folder.release()
    assert folder.lock.closed
