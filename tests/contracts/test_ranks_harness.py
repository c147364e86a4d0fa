"""`ranks(n)`: results by rank, workers reused, and a full account of every way a call can go wrong."""

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

from lockstep.testing import RanksFailed, RanksTimeout, close_pool, harness, pool_pids, ranks
from lockstep.world.world import World


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
    time.sleep(0.2)  # rank 0, which holds the store, has long returned
    pair = dist.new_group([1, 2], use_local_synchronization=True)
    tensor = torch.ones(())
    dist.all_reduce(tensor, group=pair)
    return int(tensor)


def fail_on_the_way(world: World) -> None:
    if world.rank == 1:
        raise KeyError("the cause")
    time.sleep(0.2)
    if world.rank == 0:
        raise ValueError("a consequence")


def fail_while_the_others_meet(world: World) -> None:
    if world.rank == 1:
        raise KeyError("the cause")
    dist.barrier()


def fail_while_the_others_sleep(world: World) -> None:
    if world.rank == 1:
        raise KeyError("the cause")
    time.sleep(600)


def leave(world: World) -> None:
    sys.exit(7)


def return_a_lambda(world: World) -> object:
    return lambda: None


def wait_in_three_ways(world: World) -> None:
    if world.rank == 0:
        sleep_with_the_lock()
    elif world.rank == 1:
        sleep_without_the_lock()
    meet_nobody()


def sleep_with_the_lock() -> None:
    ctypes.PyDLL(None).sleep(600)  # unlike CDLL, PyDLL keeps the interpreter's lock


def sleep_without_the_lock() -> None:
    time.sleep(600)


def meet_nobody() -> None:
    dist.barrier()


def exit_at_once(world: World) -> None:
    if world.rank == 1:
        os._exit(3)
    dist.barrier()


def kill_itself(world: World) -> None:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def crash(world: World) -> None:
    ctypes.string_at(0)


def start_a_process_and_die(world: World, pid_file: Path) -> None:
    pid_file.write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    os._exit(1)


def change_surroundings(world: World, folder: Path) -> None:
    os.environ["SET_BY_A_RANK"] = "1"
    del os.environ["SET_BY_THE_CALLER"]
    os.chdir(folder)


def look_around(world: World, *names: str) -> tuple[list[str | None], Path]:
    return [os.environ.get(name) for name in names], Path.cwd()


def report_and_sleep(world: World, folder: Path) -> None:
    draft = folder / f"{world.rank}.part"
    draft.write_text(str(os.getpid()))
    draft.rename(folder / f"{world.rank}.pid")
    time.sleep(600)


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
        ranks(3).run(fail_on_the_way)
    assert [failure.rank for failure in caught.value.failures] == [1, 0]
    message = str(caught.value)
    parts = ["2 of 3", "rank 1 (first to fail):", "in fail_on_the_way", "KeyError: 'the cause'"]
    parts += ["rank 0:", "in fail_on_the_way", "ValueError: a consequence", "returned: rank 2"]
    position = 0
    for part in parts:
        position = message.index(part, position)


def test_a_failure_ends_the_others_collectives_and_costs_no_worker() -> None:
    pids = ranks(3).run(pid)
    with pytest.raises(RanksFailed) as caught:
        ranks(3).run(fail_while_the_others_meet)
    assert caught.value.failures[0].rank == 1
    assert {failure.rank for failure in caught.value.failures} == {0, 1, 2}
    assert ranks(3).run(pid) == pids


@pytest.mark.timeout(30)
def test_ranks_that_do_not_notice_a_failure_are_not_waited_for() -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks(2, timeout_s=600).run(fail_while_the_others_sleep)
    assert [failure.rank for failure in caught.value.failures] == [1]
    assert "rank 0 did not fail" in str(caught.value)
    assert str(caught.value).count("in fail_while_the_others_sleep") == 2


def test_leaving_without_a_result_is_a_failure() -> None:
    with pytest.raises(RanksFailed, match="SystemExit: 7"):
        ranks(1).run(leave)


def test_a_result_that_cannot_travel_is_that_ranks_failure() -> None:
    with pytest.raises(RanksFailed, match="in _perform(.|\n)*pickle"):
        ranks(1).run(return_a_lambda)


def test_a_function_that_cannot_travel_is_refused_with_the_remedy() -> None:
    with pytest.raises(TypeError, match="at the top level of a module"):
        ranks(1).run(lambda world: None)


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ranks\(0\)"):
        ranks(0)


def test_a_timeout_shows_where_every_rank_was() -> None:
    with pytest.raises(RanksTimeout) as caught:
        ranks(3, timeout_s=1).run(wait_in_three_ways)
    functions = ["sleep_with_the_lock", "sleep_without_the_lock", "meet_nobody"]
    for stack, function in zip(caught.value.stacks, functions, strict=True):
        assert f"in {function}" in stack
        assert stack.splitlines()[-1].strip() in str(caught.value)
    assert pool_pids() == []


@pytest.mark.parametrize(
    ("function", "end"), [(exit_at_once, "exited with code 3"), (kill_itself, "was killed by SIGKILL")]
)
def test_a_worker_that_dies_is_named_and_replaced(function, end) -> None:
    pids = ranks(2).run(pid)
    with pytest.raises(RanksFailed) as caught:
        ranks(2).run(function)
    assert f"rank 1 (first to fail):\n  process {pids[1]} {end}" in str(caught.value)
    healed = ranks(2).run(pid)
    assert healed[0] == pids[0]
    assert healed[1] != pids[1]


def test_a_worker_that_dies_between_calls_is_replaced() -> None:
    pids = ranks(1).run(pid)
    os.kill(pids[0], signal.SIGKILL)
    psutil.wait_procs([psutil.Process(pids[0])], timeout=10)
    assert ranks(1).run(pid) != pids


def test_a_crash_shows_the_python_stack() -> None:
    with pytest.raises(RanksFailed, match="was killed by SIGSEGV(.|\n)*in crash"):
        ranks(1).run(crash)


def test_what_a_dead_rank_had_started_ends_with_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(RanksFailed, match="exited with code 1"):
        ranks(1).run(start_a_process_and_die, pid_file)
    await_end([int(pid_file.read_text())])


def test_a_call_has_the_callers_surroundings_whatever_the_last_one_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SET_BY_THE_CALLER", "yes")
    ranks(2).run(change_surroundings, tmp_path)
    names = ["SET_BY_THE_CALLER", "SET_BY_A_RANK"]
    assert ranks(2).run(look_around, *names) == [(["yes", None], Path.cwd())] * 2
    monkeypatch.chdir(tmp_path)
    assert ranks(2).run(look_around, *names) == [(["yes", None], tmp_path)] * 2


def test_env_is_for_one_call() -> None:
    for call, expected in [(ranks(2, env={"FOR_ONE_CALL": "1"}), "1"), (ranks(2), None)]:
        assert [seen for seen, _ in call.run(look_around, "FOR_ONE_CALL")] == [[expected], [expected]]


def test_a_taken_port_is_exchanged_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    free_port = harness._free_port
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [free_port(), taken.getsockname()[1]]
        monkeypatch.setattr(harness, "_free_port", ports.pop)
        assert [int(tensor) for tensor in ranks(2).run(total, 1)] == [3, 3]
    assert ports == []


def test_closing_ends_every_worker_and_the_next_call_starts_new_ones() -> None:
    pids = ranks(2).run(pid)
    close_pool()
    assert pool_pids() == []
    assert not any(psutil.pid_exists(old) for old in pids)
    assert not set(ranks(1).run(pid)) & set(pids)


def test_busy_workers_end_when_their_caller_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "caller.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from lockstep.testing import ranks\n"
        "from tests.contracts.test_ranks_harness import report_and_sleep\n"
        "if __name__ == '__main__':\n"
        "    ranks(2).run(report_and_sleep, Path(sys.argv[1]))\n"
    )
    checkout = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, script, tmp_path], env={**os.environ, "PYTHONPATH": str(checkout)}
    ) as caller:
        try:
            while len(reports := list(tmp_path.glob("*.pid"))) < 2 and caller.poll() is None:
                time.sleep(0.05)
        finally:
            caller.kill()
    pids = [int(report.read_text()) for report in reports]
    assert len(pids) == 2
    await_end(pids)


def await_end(pids: list[int]) -> None:
    """Wait until each process is gone, or a zombie that only its parent can remove."""
    deadline = time.monotonic() + 10
    while alive := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
