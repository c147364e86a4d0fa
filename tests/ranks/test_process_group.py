"""Joining a job on real processes: missing ranks, taken ports, timeouts, joining again."""

import logging
import os
import re
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep.errors import WorldError
from lockstep.testing import ranks
from lockstep.world.world import World
from tests.commands import free_port, run


def describe_world(world: World) -> tuple[object, ...]:
    return world.rank, world.local_rank, world.size, world.backend, world.device.type, os.environ["MASTER_ADDR"]


def test_each_process_has_its_own_rank_and_the_backend_of_its_device() -> None:
    expected = [(rank, rank, 3, "gloo", "cpu", "127.0.0.1") for rank in range(3)]
    assert ranks(3).run(describe_world) == expected


def listening_addresses(world: World) -> set[str]:
    lockstep.barrier()
    found = {c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}
    lockstep.barrier()
    return found


def test_one_machine_listens_on_loopback_only() -> None:
    for found in ranks(2).run(listening_addresses):
        assert found == {"127.0.0.1"}


def leave_and_join_again(world: World) -> list[int]:
    sums = []
    for join in (
        lambda: lockstep.setup_distributed(world.rank, world.size, timeout_s=30, device="cpu"),
        lambda: lockstep.init_process_group(
            "gloo", world_size=world.size, rank=world.rank, timeout=timedelta(seconds=30)
        ),
    ):
        lockstep.cleanup_distributed()
        assert not dist.is_initialized()
        again = join()
        assert (again.rank, again.size) == (world.rank, world.size)
        sums.append(int(lockstep.all_reduce(torch.tensor(again.rank))))
    return sums


def join_again_slowly(world: World) -> tuple[float, float]:
    """Return when this rank was connected, and when `setup_distributed` returned."""
    lockstep.cleanup_distributed()
    connect = dist.init_process_group
    connected = []

    def connect_slowly(*arguments: object, **options: object) -> None:
        connect(*arguments, **options)
        time.sleep(0.3 * world.rank)
        connected.append(time.monotonic())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", connect_slowly)
        lockstep.setup_distributed(world.rank, world.size, timeout_s=30, device="cpu")
    return connected[0], time.monotonic()


def test_no_rank_returns_while_another_is_still_connecting() -> None:
    """Otherwise a rank that ends early would break the other's connections, and torch would log it."""
    connected, returned = zip(*ranks(2).run(join_again_slowly), strict=True)
    assert max(connected) <= min(returned)


def test_leaving_and_joining_again() -> None:
    assert ranks(2).run(leave_and_join_again) == [[1, 1], [1, 1]]


def join_without_an_address(world: World) -> str:
    lockstep.cleanup_distributed()
    for name in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME"):
        del os.environ[name]
    lockstep.setup_distributed(world.rank, world.size, device="cpu")
    return os.environ["MASTER_ADDR"] + " " + os.environ["GLOO_SOCKET_IFNAME"]


def test_address_and_interface_are_set_if_missing() -> None:
    assert ranks(2).run(join_without_an_address) == ["127.0.0.1 lo"] * 2


def wait_past_the_timeout(world: World) -> float:
    lockstep.cleanup_distributed()
    lockstep.setup_distributed(world.rank, world.size, timeout_s=1, device="cpu")
    began = time.monotonic()
    if world.rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
            lockstep.barrier()
    else:
        time.sleep(2)
    return time.monotonic() - began


def test_the_timeout_bounds_a_collective() -> None:
    assert max(ranks(2, timeout_s=30).run(wait_past_the_timeout)) < 20


@pytest.mark.parametrize(("backend", "words"), [("nccl", "nccl"), ("mpi", "mpi"), ("carrier pigeon", "carrier pigeon")])
def test_an_unavailable_backend_is_named(backend: str, words: str) -> None:
    with pytest.raises(WorldError, match=f"backend='{words}'"):
        lockstep.setup_distributed(0, 2, backend=backend, device="cpu")


def join_without_the_last(world: World) -> str:
    lockstep.cleanup_distributed()
    if world.rank == world.size - 1:
        return "did not join"
    with pytest.raises(WorldError) as caught:
        lockstep.setup_distributed(world.rank, world.size, timeout_s=1.5, device="cpu")
    return str(caught.value)


def test_a_rank_that_never_arrives_is_named() -> None:
    first, second, _ = ranks(3).run(join_without_the_last)
    assert re.match(r"rank 0 timed out waiting for rank 2 of 3 at 127\.0\.0\.1:\d+", first)
    # Rank 0 holds the store: when it gives up first, rank 1 may find the store gone instead.
    assert re.match(r"rank 1 (timed out waiting for rank 2|cannot reach)", second)


def join_twice(world: World) -> str:
    assert lockstep.setup_distributed(world.rank, world.size, device="cpu") == world
    assert lockstep.setup_distributed(device="cpu").rank == world.rank
    with pytest.raises(WorldError) as caught:
        lockstep.setup_distributed(world.rank, world.size + 1, device="cpu")
    return str(caught.value)


def test_joining_twice_returns_the_same_world_and_a_contradiction_is_refused() -> None:
    first, _ = ranks(2).run(join_twice)
    assert first.startswith("cannot join as rank 0 of 3: this process is already rank 0 of 2")


def log_of_joining(world: World) -> list[str]:
    lockstep.cleanup_distributed()
    messages: list[str] = []
    logger = logging.getLogger("lockstep")
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        lockstep.setup_distributed(world.rank, world.size, device="cpu")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return messages


def test_setup_is_logged_by_rank_0_only() -> None:
    assert ranks(2).run(log_of_joining) == [["Initialized DDP with 2 processes (gloo, cpu)"], []]


def rejoin_with_rank_0_late(world: World) -> int:
    lockstep.barrier()
    if world.rank == 0:
        time.sleep(0.5)  # the others leave, and find the store of the job that rank 0 is still in
    lockstep.cleanup_distributed()
    return lockstep.setup_distributed(world.rank, world.size, device="cpu").rank


def test_ranks_that_join_again_before_rank_0_has_left_find_its_new_store() -> None:
    assert ranks(3).run(rejoin_with_rank_0_late) == [0, 1, 2]


def test_a_taken_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
        with pytest.raises(WorldError, match=f"cannot listen on 127.0.0.1:{port}.*MASTER_PORT"):
            lockstep.setup_distributed(0, 2, device="cpu")


def test_a_missing_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WorldError, match=f"rank 1 cannot reach the job's store at 127.0.0.1:{port}"):
        lockstep.setup_distributed(1, 2, timeout_s=1, device="cpu")


THREADS_AFTER_LEAVING = """
from pathlib import Path
import torch, lockstep

lockstep.setup_distributed()
model = torch.nn.Linear(2, 2)
torch.optim.AdamW(model.parameters())
lockstep.cleanup_distributed()
print([name for path in Path("/proc/self/task").glob("*/comm") if "gloo" in (name := path.read_text())])
"""


def test_no_thread_of_the_process_group_outlives_it(tmp_path: Path) -> None:
    """They would run while Python exits, which may crash it: "terminate called without an active exception"."""
    (tmp_path / "script.py").write_text(THREADS_AFTER_LEAVING)
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    finished = run([sys.executable, "script.py"], tmp_path, variables, cold=True)  # a warm one has imported everything
    assert finished.code == 0, finished.err
    assert finished.out == "[]\n"
