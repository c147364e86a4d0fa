"""The first stop signal requests an end after the step, whatever else is wrong; ignored signals stay ignored."""

import io
import os
import signal
from collections.abc import Iterator

import pytest

from lockstep.supervision.stop_signals import (
    STOP_SIGNALS,
    StopRequested,
    install_stop_handlers,
    stop_after_step,
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


# The reader is gone; the signal has interrupted another print.
@pytest.mark.parametrize("error", [BrokenPipeError(), RuntimeError("reentrant call inside BufferedWriter")], ids=repr)
def test_a_request_that_cannot_be_confirmed_still_counts(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.delenv("LOCKSTEP_AGENT_PID", raising=False)
    monkeypatch.setattr("sys.stderr", Unwritable(error))
    requests = []
    install_stop_handlers()
    with stop_after_step(lambda: requests.append(1)):
        os.kill(os.getpid(), signal.SIGTERM)
        assert requests == [1]
        with pytest.raises(StopRequested):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_that_the_shell_has_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    install_stop_handlers()
    requests = []
    with stop_after_step(lambda: requests.append(1)):
        os.kill(os.getpid(), signal.SIGINT)
    assert requests == []
