"""Impossible launches are refused before anything starts."""

import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockstep.config import environment
from lockstep.config.placement import MachineNode, is_loopback
from lockstep.errors import UserError
from lockstep.launcher.launch_plan import LaunchPlan, SupervisionOptions, node_of, start_agent


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (LaunchPlan(nproc=0), "--nproc-per-node 0"),
        (LaunchPlan(nnodes=0), "--nnodes 0"),
        (LaunchPlan(nnodes=2), "--node-rank and --master-addr"),
        (LaunchPlan(nnodes=2, node_rank=2, master_addr="a"), "--node-rank 2"),
        (LaunchPlan(node_rank=1), "--node-rank 1"),
        (LaunchPlan(master_port=70000), "--master-port 70000"),
        (LaunchPlan(rdzv_endpoint="a:1"), "--nnodes"),
        (LaunchPlan(nnodes=2, rdzv_endpoint="a:b"), "expected HOST:PORT"),
        (LaunchPlan(supervision=SupervisionOptions(max_restarts=-1)), "--max-restarts -1"),
    ],
)
def test_impossible_plans_are_refused(plan: LaunchPlan, words: str) -> None:
    with pytest.raises(UserError, match=words):
        start_agent(plan, [__file__])


def test_a_missing_script_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing\.py: no such script"):
        start_agent(LaunchPlan(), [str(tmp_path / "nothing.py")])


def test_a_missing_module_is_named() -> None:
    with pytest.raises(UserError, match=r"-m no_such_package\.module: no module named no_such_package"):
        start_agent(LaunchPlan(), ["-m", "no_such_package.module"])


def test_the_options_say_where_machines_meet() -> None:
    assert node_of(LaunchPlan(nnodes=2, node_rank=1, master_addr="10.0.0.1"), 4) == MachineNode(1, 2, "10.0.0.1", 29500)
    # Several machines must not be restricted to loopback, whichever option says where they meet.
    assert not is_loopback(node_of(LaunchPlan(nnodes=2, rdzv_endpoint="node-a:29400"), 4).master_addr)
    assert is_loopback(node_of(LaunchPlan(nnodes=2, rdzv_endpoint="localhost:29400"), 4).master_addr)
    assert is_loopback(node_of(LaunchPlan(nnodes=1), 4).master_addr)


def test_where_machines_meet_may_be_given_without_their_number() -> None:
    plan = LaunchPlan(master_addr="10.0.0.1", master_port=29511)
    assert node_of(plan, 4) == MachineNode(), "one machine, which listens on loopback"
    with environment.temporary_variables(
        {"RANK": "4", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}
    ):
        assert node_of(plan, 4) == MachineNode(1, 2, "10.0.0.1", 29511)
        assert node_of(LaunchPlan(), 4) == MachineNode(1, 2, "10.0.0.7", 29500)


def test_several_processes_need_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.launcher.launch_plan.sys.platform", "darwin")
    with pytest.raises(UserError, match="on Linux only, and this is darwin"):
        start_agent(LaunchPlan(nproc=2), ["script.py"])


def test_several_processes_need_the_main_thread() -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(UserError, match="from the main thread only"):
        pool.submit(start_agent, LaunchPlan(2), ["train.py"]).result()


def test_a_limit_on_open_files_that_is_too_low_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With less, agents failed halfway, or waited for ranks that never came."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (72, 1024))
    with pytest.raises(UserError, match=r"at most 72 files .* 2 processes may need 80: .*`ulimit -n`"):
        start_agent(LaunchPlan(nproc=2), [__file__])
