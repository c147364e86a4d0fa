"""JSON Lines: appended one whole line at a time, and readable whatever a kill leaves behind."""

from pathlib import Path

from lockstep.events.jsonl import JsonlWriter, newest_attempts, read_jsonl


def test_a_torn_line_is_skipped_and_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    writer = JsonlWriter(path)
    writer.emit({"step": 3})
    writer.close()
    assert [event["step"] for event in read_jsonl(path)] == [1, 3]


def test_other_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    path.write_bytes(b'[1]\n\xff\xfe\nnull\n\n{"step": 1}\n' + b"[" * 100_000 + b'\n{"step": 2}\n')
    assert [event["step"] for event in read_jsonl(path)] == [1, 2]


def test_an_overlong_line_is_skipped_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    path.write_bytes(b'"' + b"x" * (2**20 - 1) + b'{"step": 9}\n{"step": 1}\n')
    assert [event["step"] for event in read_jsonl(path)] == [1]


def test_readers_keep_the_highest_attempt_of_a_step() -> None:
    def step(attempt: int, number: int) -> dict[str, object]:
        return {"t": attempt * 100 + number, "attempt": attempt, "step": number, "kind": "step"}

    events = [step(1, 1), step(1, 2), step(1, 3), step(2, 2)]
    kept = [(event["step"], event["attempt"]) for event in newest_attempts(events)]
    assert kept == [(1, 1), (2, 2), (3, 1)]


def test_the_events_of_one_attempt_and_step_are_merged() -> None:
    envelope = {"t": 0.0, "kind": "step", "step": 3}
    events = [
        envelope | {"attempt": 1, "loss": 0.5, "note": "old"},
        envelope | {"attempt": 2, "loss": 0.25},
        envelope | {"attempt": 2, "images": {"a": "media/a-3.png"}},
        envelope | {"attempt": 2, "images": {"b": "media/b-3.png"}},
    ]
    images = {"a": "media/a-3.png", "b": "media/b-3.png"}
    assert newest_attempts(events) == [envelope | {"attempt": 2, "loss": 0.25, "images": images}]
