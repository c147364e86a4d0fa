"""Files that grow: each line once, complete ones only, and only regular files; values from untrusted JSON."""

import math
import os
from pathlib import Path

from lockstep.events.jsonl import parse_count, parse_number
from lockstep.observe.jsonl_tail import JsonlTail, read_bounded


def test_each_line_is_read_once_and_only_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = JsonlTail(path)
    assert list(lines.read_new()) == []
    path.write_text('{"a": 1}\n[2]\nnonsense\n{"a": 3')
    assert list(lines.read_new()) == [{"a": 1}]
    with path.open("a") as file:
        file.write('}\n{"a": 4}\n')
    assert list(lines.read_new()) == [{"a": 3}, {"a": 4}]
    assert list(lines.read_new()) == []
    assert not lines.is_replaced()


def test_an_overlong_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("x" * 2**20 + '{"a": 1}\n{"a": 2}\n')  # the end of the line alone would be valid
    assert list(JsonlTail(path).read_new()) == [{"a": 2}]


def test_a_replaced_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n')
    lines = JsonlTail(path)
    assert len(list(lines.read_new())) == 1
    path.write_text("")
    assert lines.is_replaced()


def test_links_pipes_and_folders_are_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"a": 1}\n')
    (tmp_path / "link").symlink_to(secret)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "."):
        assert list(JsonlTail(tmp_path / name).read_new()) == []
        assert read_bounded(tmp_path / name, 100) is None
    assert read_bounded(secret, 4) == b'{"a"'


def test_numbers_and_counts_are_parsed_and_anything_else_is_none() -> None:
    assert parse_number(3) == 3.0
    assert math.isnan(parse_number("nan") or 0.0)
    assert [parse_number(value) for value in (True, "3", None, [], 10**400)] == [None] * 5
    assert parse_count(3) == 3
    assert [parse_count(value) for value in (-1, True, 3.0, 2**63)] == [None] * 4
