"""Append-only, one whole line at a time, and readable whatever a kill left behind."""

import json
from pathlib import Path

import pytest

from lockstep.events.event import Events
from lockstep.events.jsonl import JsonLines, newest_attempts, read_lines


def test_events_carry_time_attempt_step_and_kind(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "events.jsonl"
    events = Events([JsonLines(path)], attempt=3)
    events.emit("step", 5, loss=0.25)
    events.close()
    (event,) = read_lines(path)
    assert (event["attempt"], event["step"], event["kind"], event["loss"]) == (3, 5, "step", 0.25)
    assert event["t"] > 1.7e9


def test_every_line_is_strict_json(tmp_path: Path) -> None:
    events = Events([JsonLines(tmp_path / "e.jsonl")])
    events.emit("eval", 1, metrics={"loss": float("nan"), "score": [float("inf")]})
    events.close()

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    (line,) = (tmp_path / "e.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=refuse)["metrics"] == {"loss": "nan", "score": ["inf"]}


def test_a_torn_line_is_passed_over_and_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    writer = JsonLines(path)
    writer.emit({"step": 3})
    writer.close()
    assert [event["step"] for event in read_lines(path)] == [1, 3]


def test_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    path.write_bytes(b'[1]\n\xff\xfe\nnull\n\n{"step": 1}\n' + b"[" * 100_000 + b'\n{"step": 2}\n')
    assert [event["step"] for event in read_lines(path)] == [1, 2]


def test_the_rest_of_an_overlong_line_is_not_a_line(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    path.write_bytes(b'"' + b"x" * (2**20 - 1) + b'{"step": 9}\n{"step": 1}\n')
    assert [event["step"] for event in read_lines(path)] == [1]


def test_readers_keep_the_highest_attempt_of_a_step() -> None:
    def step(attempt: int, number: int) -> dict[str, object]:
        return {"t": attempt * 100 + number, "attempt": attempt, "step": number, "kind": "step"}

    events = [step(1, 1), step(1, 2), step(1, 3), step(2, 2)]
    kept = [(event["step"], event["attempt"]) for event in newest_attempts(events)]
    assert kept == [(1, 1), (2, 2), (3, 1)]


def test_no_sinks_means_silence() -> None:
    Events().emit("step", 1, loss=object())


def test_all_that_an_attempt_said_of_a_step_is_kept() -> None:
    envelope = {"t": 0.0, "kind": "step", "step": 3}
    said = [
        envelope | {"attempt": 1, "loss": 0.5, "note": "old"},
        envelope | {"attempt": 2, "loss": 0.25},
        envelope | {"attempt": 2, "images": {"a": "media/a-3.png"}},
        envelope | {"attempt": 2, "images": {"b": "media/b-3.png"}},
    ]
    images = {"a": "media/a-3.png", "b": "media/b-3.png"}
    assert newest_attempts(said) == [envelope | {"attempt": 2, "loss": 0.25, "images": images}]
