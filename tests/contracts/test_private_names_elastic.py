"""The private names of torch and Python that launching relies on exist, and do what they did.

Seen in torch 2.11 and 2.13: [Note: elastic names] in `launcher/elastic_adapter.py`, [Note: env rendezvous names] in
`launcher/env_rendezvous.py`, [Note: flight recorder names] in `supervision/flight_recorder.py`. A failure here names
the version that changed them.
"""

import atexit
import importlib
import inspect
import multiprocessing.util
import platform
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from lockstep.config.placement import MachineNode
from lockstep.errors import UserError
from lockstep.launcher.elastic_adapter import (
    STORE_SERVER_METHOD,
    ElasticAgentAdapter,
    RanksState,
    check_elastic_names,
)
from lockstep.launcher.env_rendezvous import HANDLERS_TABLE, RENDEZVOUS_MODULE
from lockstep.launcher.rendezvous import FreshStoreRendezvous
from lockstep.supervision.failure_report import _LOADER as LOADER
from lockstep.supervision.flight_recorder import DUMP_FUNCTIONS, RECORDER_MODULE
from lockstep.supervision.wait_analysis import _BACKWARD as BACKWARD
from lockstep.supervision.wait_analysis import _COLLECTIVES as COLLECTIVES
from lockstep.supervision.wait_analysis import _WRAPPERS

TORCH = f"torch {torch.__version__}"
PYTHON = f"Python {platform.python_version()}"
WRAPPERS = [path for path in _WRAPPERS if path.startswith("torch/")]


class ScriptedAgent(ElasticAgentAdapter):
    """Its polls return the given states; `calls` lists what torch's agent called."""

    def __init__(self, *polls: RanksState | signal.Signals, restarts: Sequence[bool] = ()) -> None:
        super().__init__(2, FreshStoreRendezvous(MachineNode()), max_restarts=3)
        self._polls = list(polls)
        self._restarts = list(restarts)
        self.calls: list[str] = []
        self.variables: Sequence[Mapping[str, str]] = []

    def start_ranks(self, ranks: Sequence[int], variables: Sequence[Mapping[str, str]]) -> list[int]:
        self.calls.append(f"start {len(ranks)}")
        self.variables = variables
        return [100 + rank for rank in ranks]

    def poll_ranks(self) -> RanksState:
        found = self._polls.pop(0)
        if isinstance(found, signal.Signals):
            raise SignalException("stopped", sigval=found)
        self.calls.append(f"poll {found.name}")
        if found is RanksState.FAILED:
            self.allow_restart(self._restarts.pop(0))
        return found

    def stop_on_request(self, number: signal.Signals) -> None:
        self.calls.append(f"stop {number.name}")

    def end_ranks(self) -> None:
        self.calls.append("end")

    def on_job_ended_elsewhere(self, reason: str) -> None:
        self.calls.append(reason)

    def restart_count(self) -> int:
        return self.calls.count("poll FAILED")


def test_no_name_of_the_elastic_agent_has_changed() -> None:
    check_elastic_names()


def test_a_missing_name_is_one_clear_line_with_the_version() -> None:
    class Renamed(SimpleElasticAgent):
        _start_workers = None  # type: ignore[assignment]

        def _shutdown(self, reason: str) -> None: ...  # type: ignore[override]

    with pytest.raises(UserError, match=r"^torch \S+: its elastic agent, .* _start_workers, _shutdown: install torch"):
        check_elastic_names(Renamed)


def test_torchs_agent_starts_polls_and_ends_the_ranks() -> None:
    agent = ScriptedAgent(RanksState.RUNNING, RanksState.SUCCEEDED)
    result = agent.run()
    assert not result.is_failed(), TORCH
    assert agent.calls == ["start 2", "poll RUNNING", "poll SUCCEEDED", "end"], TORCH
    assert [each["RANK"] for each in agent.variables] == ["0", "1"], TORCH
    assert {each["WORLD_SIZE"] for each in agent.variables} == {"2"}, TORCH
    assert all(int(each["MASTER_PORT"]) > 0 for each in agent.variables), TORCH


def test_torchs_agent_restarts_exactly_as_often_as_it_is_allowed_to() -> None:
    """More often than its own `max_restarts`, 3 here, and only while `allow_restart` says so."""
    agent = ScriptedAgent(*[RanksState.FAILED] * 5, restarts=[True, True, True, True, False])
    assert agent.run().is_failed(), TORCH
    assert agent.calls == [*["start 2", "poll FAILED", "end"] * 5, "end"], TORCH
    assert agent.variables[0]["TORCHELASTIC_RESTART_COUNT"] == "4", TORCH


def test_fewer_ranks_are_started_after_one_was_removed() -> None:
    agent = ScriptedAgent(RanksState.FAILED, RanksState.SUCCEEDED, restarts=[True])
    agent.remove_one_rank()
    agent.run()
    assert agent.calls.count("start 1") == 2, TORCH
    assert (agent.num_local_ranks, agent.world_size) == (1, 1), TORCH


def test_torchs_agent_passes_a_stop_signal_on() -> None:
    agent = ScriptedAgent(RanksState.RUNNING, signal.SIGINT)
    with pytest.raises(SignalException):
        agent.run()
    assert agent.calls == ["start 2", "poll RUNNING", "stop SIGINT", "end"], TORCH


def test_torchs_c10d_rendezvous_hosts_the_ranks_store_by_a_method_that_can_be_replaced() -> None:
    method = getattr(DynamicRendezvousHandler, STORE_SERVER_METHOD, None)
    assert method is not None, f"{TORCH} has no {STORE_SERVER_METHOD}: it may listen on every interface"
    assert list(inspect.signature(method).parameters)[1:] == ["master_addr", "master_port"], TORCH


def test_torch_looks_up_what_env_means_in_a_table() -> None:
    module = importlib.import_module(RENDEZVOUS_MODULE)
    handlers = getattr(module, HANDLERS_TABLE, {})
    assert "env" in handlers, f"{TORCH}: scripts that join by `env://` meet at MASTER_PORT, open to every user"
    joined = handlers["env"]("env://?rank=0&world_size=1")
    assert inspect.isgenerator(joined), f"{TORCH}: handlers no longer yield (store, rank, world_size)"
    joined.close()


@pytest.mark.parametrize("name", DUMP_FUNCTIONS)
def test_the_flight_recorder_can_be_dumped(name: str) -> None:
    """Only a torch with NCCL has `_dump_nccl_trace_json`."""
    recorders = importlib.import_module(RECORDER_MODULE)
    if name == "_dump_nccl_trace_json" and not torch.distributed.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    dump = getattr(recorders, name, None)
    assert dump is not None, f"{TORCH} has no {RECORDER_MODULE}.{name}: hang reports lack the last collectives"
    assert isinstance(dump(), bytes), f"{TORCH}: {name} no longer returns bytes"


@pytest.mark.parametrize("path", [*COLLECTIVES, *WRAPPERS, BACKWARD, LOADER])
def test_the_torch_files_by_which_stacks_are_recognized_exist(path: str) -> None:
    """A hang report recognizes a wait for other ranks, or for data, by the files in the rank's stack."""
    site_packages = Path(torch.__file__).parents[1]
    assert (site_packages / path).exists(), f"{TORCH} has no {path}, which hang reports look for in stacks"


@pytest.mark.parametrize(("module", "name"), [(threading, "_shutdown"), (atexit, "_run_exitfuncs")])
def test_a_worker_can_run_what_python_runs_at_its_exit(module: object, name: str) -> None:
    function = getattr(module, name, None)
    assert callable(function), f"{PYTHON} has no {name}, which launcher/worker_main.py calls"
    assert not inspect.isfunction(function) or not inspect.signature(function).parameters, f"{PYTHON}: {name}"


def test_multiprocessing_keeps_its_sockets_where_the_process_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in processes that this one starts: they get a copy."""
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", str(tmp_path))  # type: ignore[attr-defined]
    assert multiprocessing.util.get_temp_dir() == str(tmp_path), PYTHON  # type: ignore[attr-defined]
    assert multiprocessing.Process()._config["tempdir"] == str(tmp_path), PYTHON  # type: ignore[attr-defined]
