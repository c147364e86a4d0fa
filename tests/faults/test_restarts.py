"""A dead rank costs one restart, a stop request ends in a save, and what no restart can fix is explained once."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from lockstep.supervision.process_title import FORK_SERVER
from tests.commands import LOCKSTEP, Finished, descendants, free_port, is_running, run, started, wait_for

HOST = socket.gethostname()
STEPS = 30

# Trains a tiny model, and fails as ordered: {"rank": 1, "step": 7, "act": "kill", "attempts": [0]}.
TRAINER = f"""
import json, os, pathlib, signal, sys, time
import lockstep, torch
import torch.nn.functional as F

class Squares(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index):
        if order.get("sample") == index and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((4,), float(index)), torch.tensor(index % 2)

def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x / 64), y, reduction="sum"), len(y)

def main(world):
    run = lockstep.Run("runs/mine", world, seed=3, sinks=[])
    model = run.prepare(torch.nn.Linear(4, 2))
    optimizer = run.optimizer(model, lambda params: torch.optim.AdamW(params, lr=1e-2))
    train = run.loader(Squares(), 16, lanes=4, workers=order.get("workers", 0))
    is_due = world.rank == order.get("rank") and world.attempt in order.get("attempts", range(1000))
    for step in run.steps(train, steps={STEPS}, save_every=order.get("save_every", 5)):
        step.accumulate(loss, model)
        progress = pathlib.Path(f"rank-{{world.rank}}.new")
        progress.write_text(f"{{step.number}} {{os.getpid()}} {{world.size}}")
        progress.rename(progress.with_suffix(".step"))  # always complete: the process id in it is sent signals
        if is_due and step.number == order["step"]:
            if order["act"] == "kill": os.kill(os.getpid(), signal.SIGKILL)
            if order["act"] == "raise": raise ValueError("planted" + order.get("varies", "") * world.attempt)
            if order["act"] == "eat":
                eaten = [torch.ones(2**24) for _ in range(1000)]
        time.sleep(order.get("pause_s", 0.0))
        step.update(optimizer)
    if world.is_main:
        pathlib.Path("digest").write_text(run.digest())
    if is_due and order["act"] == "raise at the end":
        time.sleep(1)
        raise ValueError("planted")

if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    lockstep.launch(main, device="cpu")
"""


def train(folder: Path, processes: int | str = 2, *options: str, **order: object) -> list[str]:
    (folder / "train.py").write_text(TRAINER)
    return [*LOCKSTEP, "run", "-n", str(processes), *options, "train.py", json.dumps(order)]


def train_here(folder: Path, **order: object) -> Finished:
    """Train to the end in one process, without an agent."""
    (folder / "train.py").write_text(TRAINER)
    return run([*LOCKSTEP, "run", "train.py", json.dumps(order)], folder)


def digest(folder: Path) -> str:
    return (folder / "digest").read_text()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    finished = train_here(folder)
    assert finished.code == 0, finished.err
    return digest(folder)


def reports(folder: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted((folder / "runs/mine/incidents").glob("*.json"))]


@pytest.mark.parametrize(
    ("rank", "warmth"), [(0, []), (1, []), (1, ["--cold"])], ids=["rank 0, warm", "rank 1, warm", "rank 1, cold"]
)
def test_a_killed_rank_costs_a_restart_and_no_bit(
    tmp_path: Path, undisturbed: str, rank: int, warmth: list[str]
) -> None:
    command = train(tmp_path, 2, "--max-restarts", "1", *warmth, rank=rank, step=12, act="kill", attempts=[0])
    finished = run(command, tmp_path)
    assert finished.code == 0, finished.err
    assert digest(tmp_path) == undisturbed
    other = 1 - rank
    lines = finished.err.splitlines()
    where = "failed in step 12 (forward and backward pass)"
    cause = lines.index(f"lockstep: rank {rank} of 2 on {HOST} {where}, the cause: killed by SIGKILL")
    assert re.fullmatch(rf"its victims: rank {other} \((stopped|lost contact)\)", lines[cause + 1])
    assert "restarting all ranks" in finished.err
    events = [json.loads(line) for line in (tmp_path / "runs/mine/events.jsonl").read_text().splitlines()]
    assert [event["cause"] for event in events if event["kind"] == "restart"] == ["killed by SIGKILL"]
    (report,) = reports(tmp_path)
    assert (report["kind"], report["rank"], report["victims"]) == ("crash", rank, [other])
    assert report["ranks"][str(rank)] == {"step": 11, "phase": "computing"}  # type: ignore[index]
    (text,) = (tmp_path / "runs/mine/incidents").glob("*.txt")
    assert text.read_text().startswith(f"rank {rank} of 2 on {HOST} failed in step 12")


def test_any_number_of_kills_is_survived_while_there_is_progress(tmp_path: Path, undisturbed: str) -> None:
    """One restart without progress is allowed, and there are three: each comes after a new step."""
    command = train(tmp_path, 2, "--max-restarts", "1", rank=1, act="kill")
    due = "step.number == 10 * world.attempt + 6"
    (tmp_path / "train.py").write_text(TRAINER.replace('step.number == order["step"]', due))
    finished = run(command, tmp_path)
    assert finished.code == 0, finished.err
    assert finished.err.count("restarting all ranks") == 3
    assert digest(tmp_path) == undisturbed


def test_a_crash_at_one_step_is_tried_once_more_and_then_explained(tmp_path: Path) -> None:
    finished = run(train(tmp_path, 2, "--max-restarts", "9", rank=1, step=7, act="raise"), tmp_path)
    assert finished.code == 3
    assert finished.err.count("Traceback") == 2, finished.err
    assert finished.err.count("restarting all ranks") == 1
    last = [line for line in finished.err.splitlines() if line.startswith("lockstep: ")][-1]
    assert last == "lockstep: no restart: it failed after step 6 in the same way as before, so it would again"
    assert len(reports(tmp_path)) == 2


def test_a_crash_that_differs_each_time_uses_the_budget_up(tmp_path: Path) -> None:
    finished = run(train(tmp_path, 2, "--max-restarts", "2", rank=0, step=7, act="raise", varies="!"), tmp_path)
    assert finished.code == 3
    assert finished.err.count("restarting all ranks") == 2
    assert "no restart: 2 restarts without a new step (--max-restarts)" in finished.err


def test_if_restarts_do_not_help_fewer_processes_continue(tmp_path: Path, undisturbed: str) -> None:
    """Rank 2 dies at start-up in every attempt; without it the same bits come out."""
    (tmp_path / "train.py").write_text(
        TRAINER.replace("    run = lockstep.Run(", "    if world.rank == 2: os._exit(9)\n    run = lockstep.Run(")
    )
    command = [*LOCKSTEP, "run", "-n", "1:3", "--max-restarts", "3", "train.py", "{}"]
    finished = run(command, tmp_path)
    assert finished.code == 0, finished.err
    assert finished.err.count("rank 2 of 3") == 2
    assert "with 2 processes on this machine" in finished.err
    assert (tmp_path / "rank-1.step").read_text().split()[2] == "2"
    assert digest(tmp_path) == undisturbed


def pid_of(folder: Path, rank: int) -> int:
    return int((folder / f"rank-{rank}.step").read_text().split()[1])


def step_of(folder: Path, rank: int = 0) -> int:
    """Return the step that a rank is in; 0 before its first."""
    try:
        return int((folder / f"rank-{rank}.step").read_text().split()[0])
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_request_saves_and_the_next_start_resumes(
    tmp_path: Path, undisturbed: str, stop: signal.Signals
) -> None:
    command = train(tmp_path, 2, save_every=1000, pause_s=0.05)
    with started(command, tmp_path) as agent:
        wait_for(lambda: step_of(tmp_path) >= 5, 30, "a few steps")
        agent.send_signal(stop)
        _, err = agent.communicate(timeout=20)
        assert agent.returncode == 75, err
    match = re.search(r"stopped after step (\d+), as requested: run the same command again to continue", err)
    assert match, err
    saved = [path.name for path in (tmp_path / "runs/mine/checkpoints").glob("step-*")]
    assert saved == [f"step-{match[1]}"]
    finished = train_here(tmp_path, save_every=1000)
    assert finished.code == 0, finished.err
    assert digest(tmp_path) == undisturbed


def test_a_stop_request_to_one_rank_stops_all(tmp_path: Path) -> None:
    with started(train(tmp_path, 2, "--max-restarts", "3", save_every=1000, pause_s=0.05), tmp_path) as agent:
        wait_for(lambda: step_of(tmp_path, 1) >= 3, 30, "a few steps")
        os.kill(pid_of(tmp_path, 1), signal.SIGTERM)
        _, err = agent.communicate(timeout=20)
        assert agent.returncode == 75, err
    assert "restarting" not in err
    assert "stopped after step" in err
    assert len(list((tmp_path / "runs/mine/checkpoints").glob("step-*"))) == 1


def test_a_signal_to_every_process_of_the_job_is_one_request(tmp_path: Path, undisturbed: str) -> None:
    """Schedulers and containers signal all of them: the agent (twice), the fork server, ranks and data workers."""
    with started(train(tmp_path, 2, save_every=1000, pause_s=0.05, workers=1), tmp_path) as agent:
        wait_for(lambda: step_of(tmp_path) >= 5, 60, "a few steps")
        for process in [*descendants(agent.pid), psutil.Process(agent.pid)]:
            process.terminate()
        time.sleep(0.05)
        agent.terminate()
        _, err = agent.communicate(timeout=30)
        assert agent.returncode == 75, err
    assert "stopped after step" in err
    assert len(list((tmp_path / "runs/mine/checkpoints").glob("step-*"))) == 1
    finished = train_here(tmp_path, save_every=1000)
    assert finished.code == 0, finished.err
    assert digest(tmp_path) == undisturbed


def test_the_second_interrupt_is_immediate(tmp_path: Path) -> None:
    with started(train(tmp_path, 2, pause_s=60), tmp_path) as agent:
        wait_for(lambda: step_of(tmp_path, 0) == 1 and step_of(tmp_path, 1) == 1, 30, "in the first step")
        ranks = [pid_of(tmp_path, rank) for rank in range(2)]
        agent.send_signal(signal.SIGINT)
        assert agent.stderr is not None
        assert "signal again to kill them at once" in agent.stderr.readline()
        assert agent.poll() is None
        asked = time.monotonic()
        agent.send_signal(signal.SIGINT)
        agent.communicate(timeout=20)
        assert time.monotonic() - asked < 5
        assert agent.returncode == 128 + signal.SIGINT, "nothing was saved"
        assert not any(map(is_running, ranks))


@pytest.mark.parametrize("processes", [None, 2], ids=["alone", "two processes"])
def test_a_signal_after_the_save_does_not_change_the_exit_code(tmp_path: Path, processes: int | None) -> None:
    command = train(tmp_path, processes or 1, save_every=1000, pause_s=0.05)
    if processes is None:
        command = [sys.executable, *command[-2:]]
    with started(command, tmp_path) as process:
        wait_for(lambda: step_of(tmp_path) >= 3, 30, "a few steps")
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        while "stopped after step" not in process.stderr.readline():
            assert process.poll() is None
        for _ in range(200):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.005)
        process.communicate(timeout=20)
        assert process.returncode == 75


def test_a_step_that_outlasts_the_grace_period_is_cut_short(tmp_path: Path) -> None:
    with started(train(tmp_path, 2, "--grace", "1", pause_s=60), tmp_path) as agent:
        wait_for(lambda: step_of(tmp_path, 0) == 1 and step_of(tmp_path, 1) == 1, 30, "in the first step")
        agent.send_signal(signal.SIGTERM)
        _, err = agent.communicate(timeout=20)
        assert agent.returncode == 128 + signal.SIGTERM, "nothing was saved"
        assert "not all ranks ended within 1 s (--grace): killing them" in err


# Rank 1 has said that it is there, but does not connect; rank 0 waits for it in torch, where Python handles no signal.
JOINING = """
import pathlib, time
from datetime import timedelta
import lockstep
from lockstep.config import environment
from lockstep.launcher.job_store import meet_other_ranks
place = environment.read_placement()
if place.rank == 1:
    meet_other_ranks(place, timedelta(seconds=60))
    time.sleep(1)
    pathlib.Path("waiting").touch()
    time.sleep(600)
lockstep.setup_distributed(device="cpu")
"""


def test_a_rank_that_joins_a_job_which_another_has_left_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "join.py").write_text(JOINING)
    with started([*LOCKSTEP, "run", "-n", "2", "--grace", "600", "join.py"], tmp_path) as agent:
        wait_for((tmp_path / "waiting").exists, 30, "rank 0 waits")
        agent.send_signal(signal.SIGINT)
        _, err = agent.communicate(timeout=30)
        assert agent.returncode == 128 + signal.SIGINT, err


@pytest.mark.slow
@pytest.mark.parametrize("processes", [None, 2], ids=["alone", "two processes"])
def test_a_stop_request_at_any_moment_of_the_start_is_obeyed(tmp_path: Path, processes: int | None) -> None:
    """Also during imports, where exceptions get lost and torch's C++ code ends the process."""
    command = [*LOCKSTEP, "train", "digits", "epochs=1000", *([] if processes is None else ["-n", str(processes)])]
    moments = [(0.4 * number, number % 3) for number in range(1, 9)]
    for moment_s, kind in moments:
        stop = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)[kind]
        with started([*command, "--run", f"{moment_s}"], tmp_path, cold=True) as process:
            time.sleep(moment_s)
            process.send_signal(stop)
            _, err = process.communicate(timeout=40)
        where = f"{stop.name} after {moment_s} s: {process.returncode}\n{err}"
        assert process.returncode in (75, 128 + stop), where
        assert "Traceback" not in err, where
        assert (process.returncode == 75) == any((tmp_path / f"{moment_s}" / "checkpoints").glob("step-*")), where


def test_a_killed_fork_server_takes_its_ranks_along_and_is_replaced(tmp_path: Path, undisturbed: str) -> None:
    with started(train(tmp_path, 2, "--max-restarts", "1", pause_s=0.05), tmp_path, cold=True) as agent:
        wait_for(lambda: step_of(tmp_path) >= 6, 30, "a few steps")
        (server,) = [
            child
            for child in descendants(agent.pid)
            if child.cmdline()[0].startswith(FORK_SERVER) and child.ppid() == agent.pid
        ]
        server.kill()
        _, err = agent.communicate(timeout=40)
        assert agent.returncode == 0, err
    assert digest(tmp_path) == undisturbed


def test_a_killed_data_worker_is_named_with_its_sample(tmp_path: Path) -> None:
    finished = run(train(tmp_path, 2, workers=2, sample=23), tmp_path)
    assert finished.code == 3
    assert re.search(
        r"the cause: RuntimeError: DataLoader worker \(pid.*data worker [01], reading sample 23\)", finished.err
    ), finished.err


def test_a_killed_rank_with_data_workers_leaves_no_temporary_files(tmp_path: Path) -> None:
    temporary = tmp_path / "t"
    temporary.mkdir()
    command = train(tmp_path, 2, "--max-restarts", "1", workers=1, rank=1, step=7, act="kill", attempts=[0])
    finished = run(command, tmp_path, {"TMPDIR": str(temporary)})
    assert finished.code == 0, finished.err
    assert list(temporary.iterdir()) == []


@contextmanager
def two_machines(folder: Path, **order: object) -> Iterator[list["subprocess.Popen[str]"]]:
    """Start two agents with one rank each, on this machine."""
    meet = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--max-restarts", "2"]
    commands = [train(folder, 1, *meet, "--node-rank", str(node), **order) for node in range(2)]
    with started(commands[0], folder) as first, started(commands[1], folder) as second:
        yield [first, second]


def test_two_machines_restart_together(tmp_path: Path, undisturbed: str) -> None:
    with two_machines(tmp_path, rank=1, step=12, act="kill", attempts=[0]) as agents:
        errors = [agent.communicate(timeout=90)[1] for agent in agents]
        assert [agent.returncode for agent in agents] == [0, 0], errors
    assert f"rank 1 of 2 on {HOST} failed in step 12" in errors[1]
    assert "rank 0 of 2: victims of a rank on another machine; see its output" in errors[0]
    assert digest(tmp_path) == undisturbed


def test_a_machine_that_gives_up_tells_the_other(tmp_path: Path) -> None:
    with two_machines(tmp_path, rank=1, step=7, act="raise") as agents:
        errors = [agent.communicate(timeout=90)[1] for agent in agents]
        assert [agent.returncode for agent in agents] == [3, 3], errors
    assert "in the same way as before, so it would again" in errors[1]
    assert errors[0].splitlines()[-1] == "lockstep: machine 1 ended the job; see its output"


@pytest.mark.slow
def test_a_finished_machine_is_not_waited_for(tmp_path: Path) -> None:
    with two_machines(tmp_path, rank=0, step=0, act="raise at the end") as agents:
        errors = [agent.communicate(timeout=90)[1] for agent in agents]
        assert [agent.returncode for agent in agents] == [3, 0], errors
    assert errors[0].splitlines()[-1] == "lockstep: machine 1 ended the job; see its output"


@pytest.mark.slow
def test_the_agent_of_a_lost_machine_can_be_replaced(tmp_path: Path, undisturbed: str) -> None:
    with two_machines(tmp_path, pause_s=0.1) as (first, second):
        wait_for(lambda: step_of(tmp_path, 1) >= 7, 60, "step 7")
        second.kill()
        second.wait()
        with started(second.args, tmp_path) as third:
            outputs = [agent.communicate(timeout=90)[1] for agent in (first, third)]
            assert [first.returncode, third.returncode] == [0, 0], outputs
    assert "rank 0 of 2: victims of a rank on another machine; see its output" in outputs[0]
    assert digest(tmp_path) == undisturbed


@contextmanager
def memory_limit(limit_mb: int) -> Iterator[Path]:
    """A control group (version 1) with a memory limit; skips the test where none can be made."""
    group = Path("/sys/fs/cgroup/memory") / f"lockstep-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit_mb * 2**20))
    except OSError:
        pytest.skip("control groups cannot be made here")
    try:
        yield group
    finally:
        wait_for(lambda: not (group / "cgroup.procs").read_text().strip(), 10, "the group is empty")
        group.rmdir()


def test_out_of_memory_is_distinguished_from_a_kill(tmp_path: Path) -> None:
    with memory_limit(1500) as group:
        command = train(tmp_path, 2, rank=1, step=3, act="eat")
        join = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')"
        finished = run([sys.executable, "-c", f"import os; {join}; os.execv({command[0]!r}, {command!r})"], tmp_path)
    assert finished.code == 3
    assert finished.err.startswith(
        f"lockstep: rank 1 of 2 on {HOST} failed in step 3 (forward and backward pass), the cause: "
        "killed by the kernel: the machine, or its control group, was out of memory"
    ), finished.err
