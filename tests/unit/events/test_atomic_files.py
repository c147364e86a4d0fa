"""A file is replaced as a whole, and nothing else is left beside it."""

from pathlib import Path

import pytest

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

    def fail(_draft: Path, _data: bytes) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
