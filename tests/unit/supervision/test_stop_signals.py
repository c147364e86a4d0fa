"""The first stop signal requests an end after the step, whatever else is wrong; ignored signals stay ignored."""

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console, RenderableType
from rich.progress import Progress

from lockstep.supervision.stop_signals import (
    STOP_SIGNALS,
    StopRequested,
    install_stop_handlers,
    remove_stop_handlers,
    stop_after_step,
)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGALRM)}
    yield
    remove_stop_handlers()
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


def test_a_closed_terminal_is_a_stop_request_unless_it_is_ignored() -> None:
    requests = []
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with stop_after_step(lambda: requests.append(1)):
        os.kill(os.getpid(), signal.SIGHUP)
    assert requests == [1]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    with stop_after_step(lambda: requests.append(1)):
        os.kill(os.getpid(), signal.SIGHUP)
    assert requests == [1]


def test_a_signal_during_an_import_waits_for_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "interrupted.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.2)\nwhole = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    install_stop_handlers()
    with pytest.raises(StopRequested, match="SIGINT"):
        import interrupted  # noqa: F401

        time.sleep(30)
    assert sys.modules.pop("interrupted").whole


def test_a_request_whose_exception_gets_lost_is_obeyed_before_the_first_step() -> None:
    install_stop_handlers()
    with suppress(StopRequested):
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(StopRequested, match="SIGTERM"), stop_after_step(lambda: None):
        pytest.fail("the steps have begun")


def test_a_second_signal_outside_of_the_steps_has_its_default_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCKSTEP_AGENT_PID", raising=False)
    pid = os.fork()
    if pid == 0:
        install_stop_handlers()
        with suppress(StopRequested):
            os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGHUP


def test_a_forgotten_request_is_not_obeyed() -> None:
    install_stop_handlers()
    with suppress(StopRequested):
        os.kill(os.getpid(), signal.SIGTERM)
    remove_stop_handlers()
    with stop_after_step(lambda: None):
        pass
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_timer_of_the_script_or_its_starter_keeps_running() -> None:
    """As of `alarm 60; exec lockstep run …`."""
    before = signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        install_stop_handlers()
        remove_stop_handlers()
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)


def test_systems_without_timers_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows."""
    with monkeypatch.context() as windows:
        for name in ("setitimer", "ITIMER_REAL", "SIGALRM"):
            windows.delattr(signal, name)
        install_stop_handlers()
        with pytest.raises(StopRequested):
            os.kill(os.getpid(), signal.SIGINT)
        remove_stop_handlers()


def test_a_request_is_confirmed_while_a_live_bar_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step holds the lock of the bar's values; the thread that draws holds the other, and waits for that one."""
    monkeypatch.delenv("LOCKSTEP_AGENT_PID", raising=False)
    error = io.StringIO()
    monkeypatch.setattr("sys.stderr", error)
    is_drawing = threading.Event()

    class Bar(Progress):
        def get_renderables(self) -> Iterator[RenderableType]:
            is_drawing.set()
            yield from super().get_renderables()

    requests: list[int] = []
    install_stop_handlers()
    bar = Bar(console=Console(file=io.StringIO(), force_terminal=True), auto_refresh=False)
    drawing = threading.Thread(target=bar.refresh, daemon=True)
    with bar, stop_after_step(lambda: requests.append(1)):
        is_drawing.clear()
        with bar._lock:
            drawing.start()
            assert is_drawing.wait(10)
            os.kill(os.getpid(), signal.SIGTERM)
        drawing.join(10)
    assert requests == [1]
    assert "stopping after this step" in error.getvalue()
