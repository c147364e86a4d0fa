"""The first stop signal asks for an end after the step, whatever else is wrong; an ignored one is ignored."""

import io
import os
import signal
from collections.abc import Iterator

import pytest

from lockstep.supervision.stop_signals import (
    STOP_SIGNALS,
    StopRequested,
    raise_when_asked_to_stop,
    stops_after_the_step,
)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Unwritable(io.StringIO):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, _: str) -> int:
        raise self.error


# The reader has left; the signal has interrupted another print.
@pytest.mark.parametrize("error", [BrokenPipeError(), RuntimeError("reentrant call inside BufferedWriter")], ids=repr)
def test_a_request_that_cannot_be_confirmed_is_heard_all_the_same(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.delenv("LOCKSTEP_AGENT_PID", raising=False)
    monkeypatch.setattr("sys.stderr", Unwritable(error))
    asked = []
    raise_when_asked_to_stop()
    with stops_after_the_step(lambda: asked.append(1)):
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked == [1]
        with pytest.raises(StopRequested):
            os.kill(os.getpid(), signal.SIGTERM)


def test_what_the_shell_has_us_ignore_is_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise_when_asked_to_stop()
    os.kill(os.getpid(), signal.SIGINT)
