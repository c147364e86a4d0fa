"""Only regular files are opened: nothing waits at a pipe, and links in run folders are not followed."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.config.regular_files import open_new, open_to_append, open_to_read


def put_pipe(path: Path) -> None:
    os.mkfifo(path)


def put_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def put_link(path: Path) -> None:
    path.with_name("twin").write_bytes(b"{}")
    path.symlink_to("twin")


PLANTED = {
    "pipe": (put_pipe, "not a regular file"),
    "socket": (put_socket, "not a regular file"),
    "device": (lambda path: path.symlink_to("/dev/null"), "a symbolic link, which is not followed here"),
    "folder": (Path.mkdir, "Is a directory"),
    "link": (put_link, "a symbolic link, which is not followed here"),
    "link to nothing": (lambda path: path.symlink_to("nothing"), "a symbolic link, which is not followed here"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_no_regular_file_is_refused_at_once(
    tmp_path: Path, planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    path = Path("file")
    put, problem = PLANTED[planted]
    put(path)
    openings: list[Callable[[Path], object]] = [open_to_read, open_to_append]
    for opening in openings:
        with pytest.raises(OSError, match=problem) as caught:
            opening(path)
        assert caught.value.filename == "file"
    with pytest.raises(FileExistsError):
        open_new(path)
    assert not Path("nothing").exists()


def test_a_pipe_that_has_a_reader_is_refused_for_writing(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(OSError, match="not a regular file"):
            open_to_append(path)
    finally:
        os.close(reader)


def test_links_to_files_that_the_user_names_are_followed(tmp_path: Path) -> None:
    put_link(tmp_path / "file")
    with open_to_read(tmp_path / "file", follow_links=True) as file:
        assert file.read() == b"{}"
    with pytest.raises(OSError, match="not a regular file"):
        open_to_read(Path("/dev/null"), follow_links=True)


def test_appending_creates_keeps_and_reads(tmp_path: Path) -> None:
    for content in (b"a", b"ab"):
        with open_to_append(tmp_path / "file") as file:
            file.write(content[-1:])
            file.seek(0)
            assert file.read() == content


def test_a_link_above_the_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to("disk")
    open_to_append(tmp_path / "runs" / "file").close()
    assert (tmp_path / "disk" / "file").exists()
