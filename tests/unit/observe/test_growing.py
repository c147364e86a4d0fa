"""Files that grow: each line once, whole ones only, and nothing that is not a plain file."""

import os
from pathlib import Path

from lockstep.observe.growing import GrowingLines, read_bounded


def test_each_line_once_and_a_torn_one_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = GrowingLines(path)
    assert list(lines.new()) == []
    path.write_text('{"a": 1}\n[2]\nnonsense\n{"a": 3')
    assert list(lines.new()) == [{"a": 1}]
    with path.open("a") as file:
        file.write('}\n{"a": 4}\n')
    assert list(lines.new()) == [{"a": 3}, {"a": 4}]
    assert list(lines.new()) == []
    assert not lines.is_replaced()


def test_a_line_of_megabytes_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("x" * 2**20 + '{"a": 1}\n{"a": 2}\n')  # its end alone would be a line like any other
    assert list(GrowingLines(path).new()) == [{"a": 2}]


def test_another_file_in_its_place_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n')
    lines = GrowingLines(path)
    assert len(list(lines.new())) == 1
    path.write_text("")
    assert lines.is_replaced()


def test_links_pipes_and_folders_are_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"a": 1}\n')
    (tmp_path / "link").symlink_to(secret)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "."):
        assert list(GrowingLines(tmp_path / name).new()) == []
        assert read_bounded(tmp_path / name, 100) is None
    assert read_bounded(secret, 4) == b'{"a"'
