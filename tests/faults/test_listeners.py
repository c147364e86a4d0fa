"""On one machine everything listens on loopback only, however it was started: read from the socket table."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.commands import LOCKSTEP, TORCHRUN, descendants, free_port, started, wait_for

# Joins, makes a step with a save, and sleeps: by then everything that will listen does.
SCRIPT = """
import os, pathlib, sys, time
import lockstep, torch
def main(world):
    run = lockstep.Run("runs/mine", world, sinks=[])
    model = run.prepare(torch.nn.Linear(2, 1))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    data = torch.utils.data.TensorDataset(torch.ones(8, 2))
    for step in run.steps(run.loader(data, 4, lanes=2), steps=3, save_every=1):
        step.accumulate(lambda model, batch: (model(batch[0]).sum(), len(batch[0])), model)
        step.update(optimizer)
        if step.number == 2:
            if world.attempt == 0 and "--fail" in sys.argv:
                os._exit(3)
            pathlib.Path(f"rank-{world.rank}.ready").write_text(str(os.getpid()))
            time.sleep(60)
if __name__ == "__main__":
    lockstep.launch(main, device="cpu", nproc=2 if "--nproc" in sys.argv else None)
"""

ONE_STEP = "recipe: digits\nsteps: 100000\nbatch: {global: 64}\ncheckpoint: {every: 1 steps}\n"


def by_hand(port: int) -> list[tuple[list[str], dict[str, str]]]:
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [([sys.executable, "script.py"], common | {"RANK": str(rank)}) for rank in range(2)]


def two_agents(port: int) -> list[tuple[list[str], dict[str, str]]]:
    options = ["-n", "1", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    return [([*LOCKSTEP, "run", *options, "--node-rank", str(node), "script.py"], {}) for node in range(2)]


MODES: dict[str, list[str]] = {
    "run, cold": [*LOCKSTEP, "run", "-n", "2", "--cold", "script.py"],
    "run, restarted": [*LOCKSTEP, "run", "-n", "2", "--max-restarts", "1", "script.py", "--fail"],
    "launch": [sys.executable, "script.py", "--nproc"],
    "torchrun": [*TORCHRUN, "--nproc-per-node", "2", "script.py"],
}


@contextmanager
def all_started(commands: Sequence[tuple[list[str], dict[str, str]]], folder: Path) -> Iterator[list[int]]:
    with ExitStack() as stack:
        yield [stack.enter_context(started(command, folder, env)).pid for command, env in commands]


def listening(pids: Sequence[int]) -> list[str]:
    everyone = [psutil.Process(pid) for pid in pids] + [child for pid in pids for child in descendants(pid)]
    return [
        connection.laddr.ip
        for process in everyone
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    ]


@pytest.mark.parametrize("mode", [*MODES, "by hand", "two agents"])  # "run, restarted" is also a plain `run`
def test_a_script_listens_on_loopback_only(tmp_path: Path, mode: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    several = {"by hand": by_hand, "two agents": two_agents}
    commands = several[mode](free_port()) if mode in several else [(MODES[mode], {})]
    with all_started(commands, tmp_path) as pids:
        ready = [tmp_path / f"rank-{rank}.ready" for rank in range(2)]
        wait_for(lambda: all(each.exists() and each.read_text() for each in ready), 60, "both are in their second step")
        # torchrun's own listener is not ours: look at the ranks alone.
        ranks = [int(each.read_text()) for each in ready]
        found = listening(ranks if mode == "torchrun" else pids)
        assert len(found) >= 2, "at least each rank's gloo"
        assert set(found) == {"127.0.0.1"}


def test_lockstep_train_listens_on_loopback_only(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(ONE_STEP)
    with started([*LOCKSTEP, "train", "mine.yaml", "-n", "2", "--quiet"], tmp_path) as agent:
        wait_for(lambda: any((tmp_path / "runs/mine/checkpoints").glob("step-*")), 60, "a first save")
        found = listening([agent.pid])
        assert len(found) >= 3, "the agent's store and each rank's gloo"
        assert set(found) == {"127.0.0.1"}
