"""A file is replaced as a whole, and nothing else is left beside it."""

from pathlib import Path

import pytest

from lockstep.events import atomic_files
from lockstep.events.atomic_files import write_atomic


@pytest.mark.parametrize("to_disk", [False, True])
def test_text_and_bytes_replace_the_file(tmp_path: Path, to_disk: bool) -> None:
    path = tmp_path / "run.json"
    write_atomic(path, "long content: ü", to_disk=to_disk)
    assert path.read_bytes() == "long content: ü".encode()
    write_atomic(path, b"\x00\xff", to_disk=to_disk)
    assert path.read_bytes() == b"\x00\xff"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    write_atomic(path, "old")

    def fail(_draft: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(atomic_files, "open_new", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, "new")
    assert path.read_text() == "old"


def test_a_link_in_place_of_the_file_or_its_draft_is_replaced_not_followed(tmp_path: Path) -> None:
    path, precious = tmp_path / "run.json", tmp_path / "precious"
    precious.write_text("keep")
    for link in (path, tmp_path / ".run.json.draft"):
        link.symlink_to(precious)
        write_atomic(path, "new")
        assert (path.read_text(), path.is_symlink(), precious.read_text()) == ("new", False, "keep")
        path.unlink()
