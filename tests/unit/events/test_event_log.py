"""Events reach every sink as plain values that strict JSON can hold."""

import json
from pathlib import Path

import pytest

from lockstep.events.event_log import EventLog, PrintSink
from lockstep.events.jsonl import JsonlWriter, read_jsonl


def test_events_carry_time_attempt_step_and_kind(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "events.jsonl"
    events = EventLog([JsonlWriter(path)], attempt=3)
    events.emit("step", 5, loss=0.25)
    events.close()
    (event,) = read_jsonl(path)
    assert (event["attempt"], event["step"], event["kind"], event["loss"]) == (3, 5, "step", 0.25)
    assert event["t"] > 1.7e9


def test_every_line_is_strict_json(tmp_path: Path) -> None:
    events = EventLog([JsonlWriter(tmp_path / "e.jsonl")])
    events.emit("eval", 1, metrics={"loss": float("nan"), "score": [float("inf")]})
    events.close()

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    (line,) = (tmp_path / "e.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=refuse)["metrics"] == {"loss": "nan", "score": ["inf"]}


def test_without_sinks_nothing_happens() -> None:
    EventLog().emit("step", 1, loss=object())


def test_printed_events_are_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    events = EventLog([PrintSink()])
    events.emit("step", 5, loss=0.123456789, metrics={"accuracy": 0.5}, note="a\nb " + "word " * 100)
    events.close()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("step 5: loss 0.123457, metrics accuracy 0.5, note a b word")
    assert line.endswith(" …")
    assert len(line) < 300
