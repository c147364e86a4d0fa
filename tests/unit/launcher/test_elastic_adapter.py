"""Stop signals reach torch's agent once, ignored ones not at all. More: contracts/test_private_names_elastic.py."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from lockstep.launcher.elastic_adapter import AgentStopSignals, handle_stop_signals


@pytest.fixture
def ignored_hangups() -> Iterator[None]:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


def test_several_stop_signals_at_once_are_one_request() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with AgentStopSignals().handled():
        with pytest.raises(SignalException):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.usefixtures("ignored_hangups")
def test_an_ignored_signal_stays_ignored() -> None:
    with AgentStopSignals().handled():
        os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(SignalException):
            os.kill(os.getpid(), signal.SIGTERM)
        handle_stop_signals(lambda *_: pytest.fail("the terminal has closed, which was to be ignored"))
        os.kill(os.getpid(), signal.SIGHUP)


def test_a_signal_raises_after_the_code_that_must_not_be_left_in_the_middle() -> None:
    signals, done = AgentStopSignals(), []
    with signals.handled(), pytest.raises(SignalException), signals.held():
        with suppress(Exception):  # as in many a clean-up, where the exception got lost
            os.kill(os.getpid(), signal.SIGTERM)
            with signals.held():
                done.append("inner block")
        done.append("outer block")
    assert done == ["inner block", "outer block"]
