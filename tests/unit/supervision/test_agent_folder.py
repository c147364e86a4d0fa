"""An agent removes its folder when it ends, and the folders of killed agents when it starts."""

import os
import time
from pathlib import Path

import pytest

from lockstep.supervision.agent_folder import agent_folder, clear_rank_files, remove_stale_agent_folders


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCKSTEP_MEMORY", str(tmp_path))
    return tmp_path


def make_old(path: Path) -> None:
    os.utime(path, (time.time() - 3600, time.time() - 3600))


def test_it_is_private_and_removed_at_the_end(memory: Path) -> None:
    with agent_folder() as folder:
        assert folder.parent == memory
        assert folder.stat().st_mode & 0o077 == 0
        (folder / "rank-0.heartbeat").write_text("")
        clear_rank_files(folder)
        assert [path.name for path in folder.iterdir()] == [".lock"]
    assert list(memory.iterdir()) == []


def test_a_folder_in_use_is_kept(memory: Path) -> None:
    with agent_folder() as folder:
        make_old(folder)
        with agent_folder():
            assert (folder / ".lock").exists()


def test_the_folder_of_a_killed_agent_is_removed_unless_it_is_new(memory: Path) -> None:
    left, new, others = memory / "lockstep-agent-left", memory / "lockstep-agent-new", memory / "lockstep-0-abc"
    for folder in (left, new, others):
        folder.mkdir()
        (folder / "rank-0.heartbeat").write_text("")
    make_old(left)
    make_old(others)
    remove_stale_agent_folders(memory)
    assert not left.exists()
    assert new.exists()
    assert others.exists()


def test_links_are_not_followed(memory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "precious").write_text("")
    (memory / "lockstep-agent-link").symlink_to(elsewhere)
    os.utime(memory / "lockstep-agent-link", (0, 0), follow_symlinks=False)
    remove_stale_agent_folders(memory)
    assert (elsewhere / "precious").exists()


def test_without_room_in_memory_it_is_among_the_temporary_files(
    memory: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    monkeypatch.setattr("lockstep.supervision.agent_folder._MIN_FREE_BYTES", 2**63)
    with agent_folder() as folder:
        assert folder.parent == elsewhere
    assert list(memory.iterdir()) == []
