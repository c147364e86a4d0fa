"""The file operations that a save is made of."""

import hashlib
import os
from pathlib import Path

import pytest

from lockstep.checkpoint import durable_files


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_new_file_never_overwrites_another(tmp_path: Path) -> None:
    durable_files.write_file(tmp_path / "a", b"one")
    with pytest.raises(FileExistsError):
        durable_files.write_file(tmp_path / "a", b"two")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        durable_files.write_file(tmp_path / "link", b"two")
    assert (tmp_path / "a").read_bytes() == b"one"
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_is_replaced_even_if_a_kill_left_a_draft(tmp_path: Path) -> None:
    (tmp_path / ".LATEST.draft").write_bytes(b"torn")
    for data in (b"one", b"two"):
        durable_files.replace_file(tmp_path / "LATEST", data)
        assert (tmp_path / "LATEST").read_bytes() == data
    assert names(tmp_path) == ["LATEST"]


@pytest.mark.parametrize("size", [0, 1, 4 * 2**20 - 1, 4 * 2**20, 4 * 2**20 + 1, 21 * 2**20 + 5])
def test_the_hash_is_that_of_the_chunks_hashes(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "a").write_bytes(data)
    pieces = [data[start : start + 4 * 2**20] for start in range(0, size, 4 * 2**20)]
    expected = hashlib.sha256(b"".join(hashlib.sha256(piece).digest() for piece in pieces)).hexdigest()
    assert durable_files.content_hash(tmp_path / "a") == expected


def test_remove_folder_removes_folders_files_and_links(tmp_path: Path) -> None:
    for name in ("step-1", ".draft-1", f".removed-step-2-{os.getpid()}", "step-2"):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "file").touch()
    (tmp_path / "step-3").touch()
    (tmp_path / ".draft-2").touch()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (tmp_path / ".draft-3").symlink_to(tmp_path / "kept")
    for name in ("step-1", "step-2", "step-3", ".draft-1", ".draft-2", ".draft-3", ".draft-none"):
        durable_files.remove_folder(tmp_path / name)
    assert names(tmp_path) == ["kept"]
    assert names(tmp_path / "kept") == ["file"]


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("a")
    os.mkfifo(tmp_path / "pipe")
    assert durable_files.read_start(tmp_path / "a", 2) == b"ab"
    for name, problem in (("link", "a symbolic link"), ("pipe", "not a regular file"), (".", "Is a directory")):
        with pytest.raises(OSError, match=problem):
            durable_files.read_start(tmp_path / name, 2)
        with pytest.raises(OSError, match=problem):
            durable_files.content_hash(tmp_path / name)
