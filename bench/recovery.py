"""From a kill to the next step: `lockstep run` against torchrun, with the same script, interleaved.

    .venv/bin/python bench/recovery.py [--rounds 8] [--processes 2]

The script is plain torch and DDP. In its first attempt one rank kills itself with SIGKILL at step 20; the time counts
until rank 0 of the next attempt has made its first step. From round to round, the victim alternates between rank 0 and
the last rank, and the order of the launchers changes. A job that has not made that step within 30 s counts as not
recovered; the median is over the others.

torchrun is measured twice: with its defaults, and with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which avoids stale
addresses.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

SCRIPT = """
import os, pathlib, signal, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

marks, victim = pathlib.Path(sys.argv[1]), int(sys.argv[2])
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 31):
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.1)  # in place of more to compute
    if attempt == 0 and rank == victim and step == 20:
        (marks / "kill").write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt > 0 and rank == 0 and step == 1:
        (marks / "step").write_text(f"{time.time()!r} {attempt}")
dist.destroy_process_group()
"""

BIN = Path(sys.executable).parent
LIMIT_S = 30


def recovery_s(command: list[str], variables: dict[str, str], script: Path, victim: int) -> float | None:
    """Return the time to recover, or None if the job did not recover at its first restart."""
    with tempfile.TemporaryDirectory() as marks:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | variables
        job = subprocess.Popen(
            [*command, str(script), marks, str(victim)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with suppress(subprocess.TimeoutExpired):
            job.wait(timeout=LIMIT_S)
        if job.poll() is None:  # its launcher waits for ranks that will never join: ask it to end them and itself
            job.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                job.wait(timeout=LIMIT_S)
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        try:
            made, attempt = Path(marks, "step").read_text().split()
        except FileNotFoundError:
            return None
        return float(made) - float(Path(marks, "kill").read_text()) if attempt == "1" else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    n = str(options.processes)
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", n, "--max-restarts", "1"]
    fresh_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    commands: dict[str, tuple[list[str], dict[str, str]]] = {
        "torchrun": (torchrun, {}),
        "torchrun, fresh store": (torchrun, fresh_store),
        "lockstep run": ([str(BIN / "lockstep"), "run", "-n", n, "--max-restarts", "1"], {}),
    }
    seconds: dict[str, list[float | None]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "killed.py"
        script.write_text(SCRIPT)
        for number in range(options.rounds):
            victim = 0 if number % 2 else options.processes - 1
            for name in sorted(commands, reverse=bool(number // 2 % 2)):
                seconds[name].append(recovery_s(*commands[name], script, victim))
    medians = {}
    for name, values in seconds.items():
        recovered = [value for value in values if value is not None]
        line = f"{name:<22} {len(recovered)} of {len(values)} recovered"
        if recovered:
            medians[name] = statistics.median(recovered)
            line += f"   median {medians[name]:.2f} s   {min(recovered):.2f}–{max(recovered):.2f}"
        print(line)
    for name in ("torchrun", "torchrun, fresh store"):
        if name in medians:
            print(f"ratio of medians, over {name}: {medians['lockstep run'] / medians[name]:.2f}")


if __name__ == "__main__":
    main()
