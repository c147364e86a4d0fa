"""`ranks(n)`: results by rank, workers that are reused, and a clear error for every way a call can fail."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from lockstep.errors import UserError
from lockstep.testing import RanksFailed, RanksTimeout, close_pool, pool_pids, ranks, ranks_harness
from lockstep.world.world import World
from tests.commands import is_running


def describe(world: World, greeting: str, *, mark: str) -> str:
    return f"{greeting} {world.rank} of {world.size}{mark}"


def total(world: World, value: int) -> torch.Tensor:
    tensor = torch.tensor(value * (world.rank + 1))
    dist.all_reduce(tensor)
    return tensor


def pid(world: World) -> int:
    return os.getpid()


def random_number(world: World) -> float:
    return torch.rand(()).item()


def num_threads(world: World) -> int:
    return torch.get_num_threads()


def return_before_the_others(world: World) -> int:
    if world.rank == 0:
        return -1
    time.sleep(0.2)  # until rank 0, which holds the store, has returned
    pair = dist.new_group([1, 2], use_local_synchronization=True)
    tensor = torch.ones(())
    dist.all_reduce(tensor, group=pair)
    return int(tensor)


def fail_one_after_another(world: World) -> None:
    if world.rank == 1:
        raise KeyError("the cause")
    time.sleep(0.2)
    if world.rank == 0:
        raise ValueError("a consequence")


def fail_while_the_others_are_in_a_barrier(world: World) -> None:
    if world.rank == 1:
        raise KeyError("the cause")
    dist.barrier()


def fail_while_the_others_sleep(world: World) -> None:
    if world.rank == 1:
        raise KeyError("the cause")
    time.sleep(600)


def exit_with_a_code(world: World) -> None:
    sys.exit(7)


def return_a_lambda(world: World) -> object:
    return lambda: None


def hang_in_three_ways(world: World) -> None:
    if world.rank == 0:
        sleep_with_the_gil()
    elif world.rank == 1:
        sleep_without_the_gil()
    wait_in_a_barrier()


def sleep_with_the_gil() -> None:
    ctypes.PyDLL(None).sleep(600)  # unlike CDLL, PyDLL keeps the GIL


def sleep_without_the_gil() -> None:
    time.sleep(600)


def wait_in_a_barrier() -> None:
    dist.barrier()


def exit_at_once(world: World) -> None:
    if world.rank == 1:
        os._exit(3)
    dist.barrier()


def die_in_three_ways(world: World, folder: Path) -> None:
    (folder / f"joined-{world.rank}").touch()
    while len(list(folder.glob("joined-*"))) < world.size:  # rank 0 holds the store that the others join through
        time.sleep(0.01)
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    elif world.rank == 1:
        ctypes.string_at(0)
    (folder / "pid").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    os._exit(4)


def change_environment(world: World, folder: Path) -> None:
    os.environ["SET_BY_A_RANK"] = "1"
    del os.environ["SET_BY_THE_CALLER"]
    os.chdir(folder)


def read_environment(world: World, *names: str) -> tuple[list[str | None], Path]:
    return [os.environ.get(name) for name in names], Path.cwd()


def test_workers_that_die_between_calls_or_are_closed_are_replaced_at_the_next() -> None:
    killed = ranks(1).run(pid)
    os.kill(killed[0], signal.SIGKILL)
    psutil.wait_procs([psutil.Process(killed[0])], timeout=10)  # this fetches the exit code, as another waiter might
    closed = ranks(1).run(pid)
    close_pool()
    assert pool_pids() == []
    assert not is_running(closed[0])
    assert ranks(1).run(pid) not in (killed, closed)


def test_results_come_in_rank_order() -> None:
    assert ranks(3).run(describe, "rank", mark="!") == ["rank 0 of 3!", "rank 1 of 3!", "rank 2 of 3!"]


def test_ranks_are_joined_by_a_process_group() -> None:
    assert [int(tensor) for tensor in ranks(3).run(total, 10)] == [60, 60, 60]


def test_workers_are_reused_whatever_the_size() -> None:
    pids = ranks(3).run(pid)
    assert len({*pids, os.getpid()}) == 4
    assert ranks(2).run(pid) == pids[:2]
    assert ranks(1).run(pid) == pids[:1]
    assert ranks(3).run(pid) == pids
    assert pool_pids() == pids


def test_a_worker_has_one_torch_thread() -> None:
    assert ranks(2).run(num_threads) == [1, 1]


def test_random_numbers_repeat_from_call_to_call_and_differ_between_ranks() -> None:
    numbers = ranks(2).run(random_number)
    assert numbers[0] != numbers[1]
    assert ranks(2).run(random_number) == numbers


def test_a_rank_that_returns_stays_in_the_group_until_all_have() -> None:
    assert ranks(3).run(return_before_the_others) == [-1, 2, 2]


def test_every_traceback_is_shown_and_the_first_failure_comes_first() -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks(3).run(fail_one_after_another)
    assert [failure.rank for failure in caught.value.failures] == [1, 0]
    message = str(caught.value)
    parts = ["2 of 3", "rank 1 (first to fail):", "in fail_one_after_another", "KeyError: 'the cause'"]
    parts += ["rank 0:", "in fail_one_after_another", "ValueError: a consequence", "returned: rank 2"]
    position = 0
    for part in parts:
        position = message.index(part, position)


def test_a_failure_ends_the_others_collectives_and_costs_no_worker() -> None:
    pids = ranks(3).run(pid)
    with pytest.raises(RanksFailed) as caught:
        ranks(3).run(fail_while_the_others_are_in_a_barrier)
    assert caught.value.failures[0].rank == 1
    assert {failure.rank for failure in caught.value.failures} == {0, 1, 2}
    assert ranks(3).run(pid) == pids


def test_exiting_without_a_result_is_a_failure() -> None:
    with pytest.raises(RanksFailed, match="SystemExit: 7"):
        ranks(1).run(exit_with_a_code)


def test_a_result_that_cannot_be_pickled_is_that_ranks_failure() -> None:
    with pytest.raises(RanksFailed, match=r"in _perform(.|\n)*pickle"):
        ranks(1).run(return_a_lambda)


def test_a_function_that_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(UserError, match="at the top level of a module"):
        ranks(1).run(lambda _: None)


def test_zero_ranks_are_refused() -> None:
    with pytest.raises(UserError, match=r"ranks\(0\)"):
        ranks(0)


def test_a_death_is_listed_before_its_consequences_and_the_worker_is_replaced() -> None:
    pids = ranks(2).run(pid)
    with pytest.raises(RanksFailed) as caught:
        ranks(2).run(exit_at_once)
    assert f"rank 1 (first to fail):\n  process {pids[1]} exited with code 3" in str(caught.value)
    assert pids[1] not in pool_pids()
    replaced = ranks(2).run(pid)
    assert replaced[0] == pids[0]
    assert replaced[1] != pids[1]


def test_a_call_has_the_callers_environment_whatever_the_last_one_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SET_BY_THE_CALLER", "yes")
    ranks(2).run(change_environment, tmp_path)
    names = ["SET_BY_THE_CALLER", "SET_BY_A_RANK"]
    assert ranks(2).run(read_environment, *names) == [(["yes", None], Path.cwd())] * 2
    monkeypatch.chdir(tmp_path)
    assert ranks(2).run(read_environment, *names) == [(["yes", None], tmp_path)] * 2


def test_env_is_for_one_call() -> None:
    for pair, expected in [(ranks(2, env={"FOR_ONE_CALL": "1"}), "1"), (ranks(2), None)]:
        assert [seen for seen, _ in pair.run(read_environment, "FOR_ONE_CALL")] == [[expected], [expected]]


def test_a_taken_port_is_replaced_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    free_port = ranks_harness._free_port
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [free_port(), taken.getsockname()[1]]
        monkeypatch.setattr(ranks_harness, "_free_port", ports.pop)
        monkeypatch.setattr(ranks_harness, "GRACE_S", 0.2)  # rank 1 does not learn of it: do not wait for it long
        assert [int(tensor) for tensor in ranks(2).run(total, 1)] == [3, 3]
    assert ports == []


@pytest.mark.timeout(30)
def test_ranks_that_do_not_notice_a_failure_are_not_waited_for() -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks(2, timeout_s=600).run(fail_while_the_others_sleep)
    assert [failure.rank for failure in caught.value.failures] == [1]
    assert "rank 0 did not fail" in str(caught.value)
    assert str(caught.value).count("in fail_while_the_others_sleep") == 2


def test_a_timeout_shows_where_every_rank_was() -> None:
    with pytest.raises(RanksTimeout) as caught:
        ranks(3, timeout_s=2).run(hang_in_three_ways)
    functions = ["sleep_with_the_gil", "sleep_without_the_gil", "wait_in_a_barrier"]
    for stack, function in zip(caught.value.stacks, functions, strict=True):
        assert f"in {function}" in stack
        assert stack.splitlines()[-1].strip() in str(caught.value)
    assert pool_pids() == []


def test_every_death_is_reported_with_its_cause(tmp_path: Path) -> None:
    pids = ranks(3).run(pid)
    with pytest.raises(RanksFailed) as caught:
        ranks(3).run(die_in_three_ways, tmp_path)
    details = {failure.rank: failure.details for failure in caught.value.failures}
    assert details[0].startswith(f"process {pids[0]} was killed by SIGKILL")
    assert details[1].startswith(f"process {pids[1]} was killed by SIGSEGV")
    assert "in die_in_three_ways" in details[1]
    assert details[2].startswith(f"process {pids[2]} exited with code 4")
    await_end([int((tmp_path / "pid").read_text())])  # processes that a rank has started end with it


CALLER = """
import os, sys, time
from pathlib import Path

from lockstep.testing import ranks

def report_and_sleep(world, folder):
    (folder / "draft").write_text(str(os.getpid()))
    (folder / "draft").rename(folder / "pid")
    time.sleep(600)

if __name__ == "__main__":
    ranks(1).run(report_and_sleep, Path(sys.argv[1]))
"""


def test_busy_workers_end_when_their_caller_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "caller.py"
    script.write_text(CALLER)
    report = tmp_path / "pid"
    with subprocess.Popen([sys.executable, script, tmp_path]) as caller:
        while not report.exists() and caller.poll() is None:
            time.sleep(0.05)
        caller.kill()
    await_end([int(report.read_text())])


def await_end(pids: list[int]) -> None:
    """Wait until each process is gone, or a zombie that only its parent can remove."""
    deadline = time.monotonic() + 10
    while alive := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.02)
