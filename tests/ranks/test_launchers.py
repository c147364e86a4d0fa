"""The same script, unchanged, under every launcher: python, lockstep, torchrun and its predecessors, Slurm, by hand."""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.commands import LOCKSTEP, TORCHRUN, Finished, free_port, run, started

SCRIPT = """
import argparse, json, signal, sys
import torch, lockstep

def main(world):
    if "again" in sys.argv:   # the launcher's store still holds what the first group left there
        sys.argv.remove("again")
        lockstep.cleanup_distributed()
        world = lockstep.setup_distributed(device="cpu")
    args = argparse.ArgumentParser()
    args.add_argument("--epochs", type=int)
    args.add_argument("--nproc")
    epochs = args.parse_args().epochs
    # One write a line: torchrun's workers are unbuffered and share their output.
    sys.stdout.write(json.dumps({
        "rank": world.rank, "local": world.local_rank, "size": world.size, "node": world.node,
        "launcher": world.launcher, "backend": world.backend, "epochs": epochs, "threads": torch.get_num_threads(),
        "sum": int(lockstep.all_reduce(torch.tensor(world.rank + 1))), "ranks": [int(r) for r in
        lockstep.all_gather(torch.tensor(world.rank))],
    }) + "\\n")

if __name__ == "__main__":
    nproc = next((int(a.partition("=")[2]) for a in sys.argv if a.startswith("--nproc=")), None)
    before = signal.getsignal(signal.SIGINT)   # a shell's background job starts with it ignored
    lockstep.launch(main, nproc=nproc, device="cpu")
    restored = signal.getsignal(signal.SIGINT) is before
    print("after launch" if restored else "somebody else's signal handler", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scripts")
    (path / "train.py").write_text(SCRIPT)
    return path


def reports(*finished: Finished) -> list[dict[str, Any]]:
    for result in finished:
        assert result.code == 0, result.err
    lines = [line for result in finished for line in result.out.splitlines() if line.startswith("{")]
    return sorted(map(json.loads, lines), key=lambda report: report["rank"])


def check_pair(found: list[dict[str, Any]], launcher: str) -> None:
    assert [report["rank"] for report in found] == [0, 1]
    assert {report["size"] for report in found} == {2}
    assert {report["sum"] for report in found} == {3}
    assert {report["backend"] for report in found} == {"gloo"}
    assert {report["launcher"] for report in found} == {launcher}
    assert {report["epochs"] for report in found} == {3}
    assert {report["threads"] for report in found} == {1}


PLAIN = ["train.py", "--epochs", "3"]
MODULE = ["-m", "train", "--epochs", "3"]
ELDER = [sys.executable, "-W", "ignore", "-m", "torch.distributed.launch", "--nproc-per-node=2", *TORCHRUN[1:]]


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        pytest.param([*LOCKSTEP, "run", "-n", "2", *PLAIN], "lockstep", id="lockstep run"),
        pytest.param(
            [*LOCKSTEP, "run", "-n", "2", *PLAIN, "again"],
            "lockstep",
            id="leaving and joining again",
            marks=pytest.mark.slow,
        ),
        pytest.param([*LOCKSTEP, "run", "--nproc_per_node=2", *MODULE], "lockstep", id="lockstep run -m"),
        pytest.param([sys.executable, *PLAIN, "--nproc=2"], "lockstep", id="launch(main, nproc=2)"),
        pytest.param([*TORCHRUN, "--nproc-per-node=2", *PLAIN], "torchrun", id="torchrun"),
        pytest.param(
            [sys.executable, "-m", "torch.distributed.run", *TORCHRUN[1:], "--nproc-per-node=2", *MODULE],
            "torchrun",
            id="python -m torch.distributed.run -m",
            marks=pytest.mark.slow,
        ),
        pytest.param([*ELDER, *PLAIN], "torchrun", id="torch.distributed.launch with --local-rank"),
    ],
)
def test_two_processes(folder: Path, command: list[str], launcher: str) -> None:
    finished = run(command, folder)
    check_pair(reports(finished), launcher)
    # Processes that launch() started end there and the script continues once; otherwise every process continues.
    assert finished.err.count("after launch") == (1 if "--nproc=2" in command else 2)


def test_plain_python_is_one_process(folder: Path) -> None:
    (report,) = reports(run([sys.executable, *PLAIN], folder))
    assert (report["size"], report["backend"], report["launcher"], report["sum"]) == (1, None, "none", 1)
    assert report["threads"] == 1


def test_a_single_process_under_a_launcher_is_warned(folder: Path) -> None:
    finished = run([*LOCKSTEP, "run", "-n", "1", *PLAIN], folder)
    assert reports(finished)[0]["size"] == 1
    assert "brings no parallelism" in finished.err


def together(folder: Path, commands: list[list[str]], variables: list[dict[str, str]]) -> list[Finished]:
    with ExitStack() as stack:
        running = [
            stack.enter_context(started(command, folder, env)) for command, env in zip(commands, variables, strict=True)
        ]
        ends = [(process, *process.communicate(timeout=90)) for process in running]
        return [Finished(process.returncode, out, err) for process, out, err in ends]


def test_variables_set_by_hand(folder: Path) -> None:
    port = str(free_port())
    variables = [
        {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port} for rank in range(2)
    ]
    check_pair(reports(*together(folder, [[sys.executable, *PLAIN]] * 2, variables)), "hand-set")


def test_a_slurm_step(folder: Path) -> None:
    variables = [
        {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NODEID": "0",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURM_JOB_ID": "77",
            "MASTER_PORT": str(port),
        }
        for port in [free_port()]
        for rank in range(2)
    ]
    check_pair(reports(*together(folder, [[sys.executable, *PLAIN]] * 2, variables)), "slurm")


@pytest.mark.parametrize("way", ["--node-rank", pytest.param("--rdzv-endpoint", marks=pytest.mark.slow), "RANK"])
def test_two_agents_make_one_job(folder: Path, way: str) -> None:
    port = str(free_port())
    agent = [*LOCKSTEP, "run", "-n", "1"]
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    commands, variables = {
        "--node-rank": (
            [
                [*agent, "--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", port]
                for node in range(2)
            ],
            [{}, {}],
        ),
        "--rdzv-endpoint": (
            [[*agent, "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}"]] * 2,
            [{}, {}],
        ),
        "RANK": ([agent] * 2, [meet | {"RANK": str(first_rank)} for first_rank in range(2)]),
    }[way]
    found = reports(*together(folder, [[*command, *PLAIN] for command in commands], variables))
    check_pair(found, "lockstep")
    assert sorted(report["node"] for report in found) == [0, 1]
    assert {report["local"] for report in found} == {0}


def test_the_command_itself_as_a_torchrun_worker(tmp_path: Path) -> None:
    command = [*TORCHRUN, "--nproc-per-node=2", "-m", "lockstep", "train", "digits", "--quick", "--run-dir=here"]
    finished = run(command, tmp_path)
    assert finished.code == 0, finished.err
    assert "Initialized DDP with 2 processes" in finished.out
    assert "supervised by the launcher that started them (torchrun)" in finished.out
    assert finished.out.count("effective batch 64 = 4 lanes × 16 on 2 processes") == 1, "one rank alone prints"
    assert (tmp_path / "here" / "ranks" / "1.jsonl").exists()
