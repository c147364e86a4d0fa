"""A logger that fails is switched off; training is not."""

import logging
from pathlib import Path

import pytest

from lockstep.errors import UserError
from lockstep.events.event import Event, Events
from lockstep.observe.loggers.guarded import Guarded
from tests.sinks import Kept


class Failing(Kept):
    """Fails at a step, and perhaps at the end."""

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


def tell(sink: Failing, other: Kept, num_steps: int = 4) -> None:
    events = Events([Guarded(sink, "log.x"), other])
    for step in range(num_steps):
        events.emit("step", step)
    events.close()


@pytest.mark.parametrize("at_close", [False, True])
def test_a_failing_sink_is_switched_off_with_one_warning(caplog: pytest.LogCaptureFixture, at_close: bool) -> None:
    sink, other = Failing(OSError(28, "No space\nleft"), at=1, at_close=at_close), Kept()
    with caplog.at_level(logging.WARNING, "lockstep"):
        tell(sink, other)
    assert [event["step"] for event in sink.events] == [0]
    assert [event["step"] for event in other.events] == [0, 1, 2, 3]
    assert sink.num_closed == 1
    assert caplog.messages == ["log.x is switched off at step 1, training goes on: OSError: [Errno 28] No space left"]


def test_one_that_fails_at_the_end_is_told_too(caplog: pytest.LogCaptureFixture) -> None:
    sink = Failing(RuntimeError(), at_close=True)
    tell(sink, Kept())
    assert len(sink.events) == 4
    assert caplog.messages == ["log.x did not close: RuntimeError()"]


def test_what_must_stop_the_training_does() -> None:
    with pytest.raises(UserError, match="required"):
        tell(Failing(UserError("required"), at=1), Kept())


def test_a_full_disk_does_not_stop_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the real thing: /dev/full refuses every write, as a full disk does."""
    from lockstep.events.jsonl import JsonLines

    path = tmp_path / "full"
    path.symlink_to("/dev/full")
    events = Events([Guarded(JsonLines(path), "log.x")])
    events.emit("step", 1)
    events.emit("step", 2)
    events.close()
    assert len(caplog.messages) == 1
    assert "No space left" in caplog.messages[0]
