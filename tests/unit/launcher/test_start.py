"""Impossible launches are refused before anything starts."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockstep.config.placement import Node, is_loopback
from lockstep.errors import UserError
from lockstep.launcher.plan import LaunchPlan, Supervision, node_of
from lockstep.launcher.start import start


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
        (LaunchPlan(supervision=Supervision(max_restarts=-1)), "--max-restarts -1"),
    ],
)
def test_impossible_plans(plan: LaunchPlan, words: str) -> None:
    with pytest.raises(UserError, match=words):
        start(plan, [__file__])


def test_a_missing_script(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing\.py: no such script"):
        start(LaunchPlan(), [str(tmp_path / "nothing.py")])


def test_a_missing_module() -> None:
    with pytest.raises(UserError, match=r"-m no_such_package\.module: no module named no_such_package"):
        start(LaunchPlan(), ["-m", "no_such_package.module"])


def test_auto_means_the_cores_this_process_may_use_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.launcher import agent

    monkeypatch.setattr(agent.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(agent.os, "sched_getaffinity", lambda _: {0, 4, 5})
    assert agent.count_devices() == 3
    monkeypatch.setattr(agent.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(agent.torch.cuda, "device_count", lambda: 8)
    assert agent.count_devices() == 8


def test_where_machines_meet() -> None:
    assert node_of(LaunchPlan(nnodes=2, node_rank=1, master_addr="10.0.0.1"), 4) == Node(1, 2, "10.0.0.1", 29500)
    # Several machines must not be kept to the loopback interface, however they are told to meet.
    assert not is_loopback(node_of(LaunchPlan(nnodes=2, rdzv_endpoint="node-a:29400"), 4).master_addr)
    assert is_loopback(node_of(LaunchPlan(nnodes=2, rdzv_endpoint="localhost:29400"), 4).master_addr)
    assert is_loopback(node_of(LaunchPlan(nnodes=1), 4).master_addr)


def test_elsewhere_than_on_linux_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.launcher.start.sys.platform", "darwin")
    with pytest.raises(UserError, match="on Linux only, and this is darwin"):
        start(LaunchPlan(nproc=2), ["script.py"])


def test_beside_the_main_thread_it_is_said() -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(UserError, match="from the main thread only"):
        pool.submit(start, LaunchPlan(2), ["train.py"]).result()
