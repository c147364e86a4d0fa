"""Stop signals reach torch's agent once, ignored ones not at all. More: contracts/test_private_names_elastic.py."""

import os
import signal
from collections.abc import Iterator

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from lockstep.launcher.elastic_adapter import handle_stop_signals, stop_signals_raise


@pytest.fixture
def ignored_hangups() -> Iterator[None]:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


def test_several_stop_signals_at_once_are_one_request() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_signals_raise():
        with pytest.raises(SignalException):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.usefixtures("ignored_hangups")
def test_an_ignored_signal_stays_ignored() -> None:
    with stop_signals_raise():
        os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(SignalException):
            os.kill(os.getpid(), signal.SIGTERM)
        handle_stop_signals(lambda *_: pytest.fail("the terminal has closed, which was to be ignored"))
        os.kill(os.getpid(), signal.SIGHUP)
