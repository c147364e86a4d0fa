"""What an agent does with signals and with a terminal that has gone."""

import io
import os
import signal
from collections.abc import Iterator

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from lockstep.config.placement import Node
from lockstep.errors import EXIT_FAILED
from lockstep.launcher import agent
from lockstep.launcher.plan import Supervision
from lockstep.launcher.processes import Processes


@pytest.fixture
def no_hangups() -> Iterator[None]:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_signal_that_comes_twice_at_once_is_one_request() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with agent._stop_signals_raise():
        with pytest.raises(SignalException):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.usefixtures("no_hangups")
def test_what_is_ignored_stays_so() -> None:
    with agent._stop_signals_raise():
        os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(SignalException):
            os.kill(os.getpid(), signal.SIGTERM)
        agent._handle_stop_signals(lambda *_: pytest.fail("the terminal has closed, and that was to be ignored"))
        os.kill(os.getpid(), signal.SIGHUP)


class Gone(io.StringIO):
    def write(self, _: str) -> int:
        raise BrokenPipeError


def test_words_that_nobody_reads_stop_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends `lockstep … 2>&1 | tee log` and its tee at once."""
    monkeypatch.setattr("sys.stderr", Gone())
    agent._Agent.say(object.__new__(agent._Agent), "stopping 2 ranks")


def test_a_job_that_another_machine_has_ended_has_failed_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not: was stopped, and is to be started again."""

    class EndedElsewhere:
        verdict = None

        def run(self) -> None:
            """As torch's agent returns from a rendezvous that was called off."""

    monkeypatch.setattr(agent, "_Agent", lambda *_: EndedElsewhere())
    processes = Processes(["train.py"], is_warm=False)
    assert agent.run_agent(processes, 1, Node(), Supervision()) == EXIT_FAILED
