"""What events become for a logger, and that a logger which fails is switched off while training continues."""

import logging
import math
from io import FileIO
from pathlib import Path

import pytest

from lockstep.errors import UserError
from lockstep.events import jsonl
from lockstep.events.event_log import Event, EventLog
from lockstep.events.guarded_sink import GuardedSink
from lockstep.events.jsonl import JsonlWriter
from lockstep.loggers.logger_sink import LoggedValues, logged_values
from tests.sinks import RecordingSink

FOLDER = Path("runs/a")


def values_of(kind: str, **fields: object) -> LoggedValues:
    kept = RecordingSink()
    EventLog([kept]).emit(kind, 7, **fields)  # type: ignore[arg-type]
    return logged_values(kept.events[0], FOLDER)


def test_numbers_of_a_step_are_training_curves() -> None:
    values = values_of("step", loss=0.5, epoch=2, note="hello", nothing=None)
    assert values.scalars == {"train/loss": 0.5, "train/epoch": 2.0}
    assert (values.step, values.texts) == (7, {})


def test_metrics_of_an_evaluation_are_evaluation_curves() -> None:
    assert values_of("eval", epoch=1, metrics={"accuracy": 0.9, "loss": 2}).scalars == {
        "eval/epoch": 1.0,
        "eval/accuracy": 0.9,
        "eval/loss": 2.0,
    }


def test_non_finite_numbers_are_floats_again() -> None:
    scalars = values_of("step", a=float("nan"), b=float("inf"), c=-float("inf")).scalars
    assert math.isnan(scalars["train/a"])
    assert (scalars["train/b"], scalars["train/c"]) == (math.inf, -math.inf)


def test_nested_numbers_have_paths_and_lists_are_not_curves() -> None:
    scalars = values_of("step", grad={"norm": {"a": 1.0}, "all": [1.0, 2.0]}, losses=[0.5], ok=True).scalars
    assert scalars == {"train/grad/norm/a": 1.0, "train/ok": 1.0}


def test_images_are_paths_and_texts_are_text() -> None:
    values = values_of("step", images={"samples": "media/samples-7.png"}, texts={"sample": "hello"})
    assert values.images == {"images/samples": FOLDER / "media/samples-7.png"}
    assert values.texts == {"texts/sample": "hello"}
    assert values.scalars == {}


@pytest.mark.parametrize("kind", ["start", "checkpoint", "restart", "incident", "end"])
def test_other_events_are_text(kind: str) -> None:
    values = values_of(kind, path="checkpoints/step-7", metrics={"accuracy": 0.5})
    assert values.texts == {f"run/{kind}": "path: checkpoints/step-7\nmetrics/accuracy: 0.5"}
    assert values.scalars == {}


class FailingSink(RecordingSink):
    """Raises at a step, and when closed if asked to."""

    def __init__(self, error: Exception, at: int | None = None, at_close: bool = False) -> None:
        super().__init__()
        self._error, self._at, self._at_close = error, at, at_close
        self.num_closed = 0

    def emit(self, event: Event) -> None:
        if event["step"] == self._at:
            raise self._error
        super().emit(event)

    def close(self) -> None:
        self.num_closed += 1
        if self._at_close:
            raise self._error


def emit_steps(sink: FailingSink, other: RecordingSink, num_steps: int = 4) -> None:
    events = EventLog([GuardedSink(sink, "log.x"), other])
    for step in range(num_steps):
        events.emit("step", step)
    events.close()


@pytest.mark.parametrize("at_close", [False, True])
def test_a_failing_sink_is_switched_off_with_one_warning(caplog: pytest.LogCaptureFixture, at_close: bool) -> None:
    sink, other = FailingSink(OSError(28, "No space\nleft"), at=1, at_close=at_close), RecordingSink()
    with caplog.at_level(logging.WARNING, "lockstep"):
        emit_steps(sink, other)
    assert [event["step"] for event in sink.events] == [0]
    assert [event["step"] for event in other.events] == [0, 1, 2, 3]
    assert sink.num_closed == 1
    assert caplog.messages == ["log.x is switched off at step 1, training continues: OSError: [Errno 28] No space left"]


def test_a_failure_to_close_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    sink = FailingSink(RuntimeError(), at_close=True)
    emit_steps(sink, RecordingSink())
    assert len(sink.events) == 4
    assert caplog.messages == ["log.x did not close cleanly: RuntimeError()"]


def test_a_user_error_stops_training() -> None:
    with pytest.raises(UserError, match="required"):
        emit_steps(FailingSink(UserError("required"), at=1), RecordingSink())


def test_a_full_disk_does_not_stop_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/full refuses every write, as a full disk does."""
    monkeypatch.setattr(jsonl, "open_to_append", lambda _path: FileIO("/dev/full", "w+"))
    events = EventLog([GuardedSink(JsonlWriter(tmp_path / "full"), "log.x")])
    events.emit("step", 1)
    events.emit("step", 2)
    events.close()
    assert len(caplog.messages) == 1
    assert "No space left" in caplog.messages[0]
