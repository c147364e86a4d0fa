"""What an agent does when its terminal or another machine is gone, and how many processes `-n auto` means."""

import io

import pytest

from lockstep.config.placement import MachineNode
from lockstep.errors import EXIT_FAILED
from lockstep.launcher import agent
from lockstep.launcher.agent import Agent
from lockstep.launcher.elastic_adapter import AgentStopSignals
from lockstep.launcher.launch_plan import SupervisionOptions
from lockstep.launcher.rank_processes import RankProcesses


class ClosedTerminal(io.StringIO):
    def write(self, _: str) -> int:
        raise BrokenPipeError


def test_a_message_that_cannot_be_printed_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends `lockstep … 2>&1 | tee log` and its tee at once."""
    monkeypatch.setattr("sys.stderr", ClosedTerminal())
    Agent.say(object.__new__(Agent), "stopping 2 ranks")


def test_a_job_that_another_machine_has_ended_has_failed_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exit code is not that of a stop request, after which the job is started again."""

    class EndedElsewhere:
        verdict = None
        stop_signals = AgentStopSignals()

        def run(self) -> None:
            """Torch's agent returns None from a rendezvous that was cancelled."""

    monkeypatch.setattr(agent, "Agent", lambda *_: EndedElsewhere())
    processes = RankProcesses(["train.py"], is_warm=False)
    assert agent.run_agent(processes, 1, MachineNode(), SupervisionOptions()) == EXIT_FAILED


def test_auto_means_one_process_per_gpu_or_per_usable_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(agent.os, "sched_getaffinity", lambda _: {0, 4, 5})
    assert agent.count_devices() == 3
    monkeypatch.setattr(agent.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(agent.torch.cuda, "device_count", lambda: 8)
    assert agent.count_devices() == 8
