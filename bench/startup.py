"""From command to first step: `lockstep run` against a bare torchrun of the same script, interleaved.

    .venv/bin/python bench/startup.py [--rounds 7] [--processes 2]

The script is plain torch: join the group, one step of a small DDP model, then each rank writes down the time. The
slowest rank counts, from just before the command is started. The ratio is that of the medians; its range is over the
rounds. `lockstep --help` is timed too.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import os, pathlib, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(8, 64)).sum().backward()
optimizer.step()
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(repr(time.time()))
dist.destroy_process_group()
"""

BIN = Path(sys.executable).parent


def time_to_first_step(command: list[str], script: Path, processes: int) -> float:
    with tempfile.TemporaryDirectory() as marks:
        began = time.time()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run([*command, str(script), marks], check=True, env=environment, capture_output=True)
        steps = [float(path.read_text()) for path in Path(marks).iterdir()]
        assert len(steps) == processes
        return max(steps) - began


def time_of(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    n = str(options.processes)
    commands = {
        "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", n],
        "lockstep run": [str(BIN / "lockstep"), "run", "-n", n],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    helps: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "first_step.py"
        script.write_text(SCRIPT)
        for number in range(options.rounds + 1):
            # The first round warms the disk cache and is not counted; the order alternates.
            for name in sorted(commands, reverse=bool(number % 2)):
                taken = time_to_first_step(commands[name], script, options.processes)
                if number:
                    seconds[name].append(taken)
            if number:
                helps.append(time_of([str(BIN / "lockstep"), "--help"]))
    for name, values in seconds.items():
        print(f"{name:<14} median {statistics.median(values):.2f} s   {min(values):.2f}–{max(values):.2f}")
    ratios = [ours / theirs for ours, theirs in zip(seconds["lockstep run"], seconds["torchrun"], strict=True)]
    ratio = statistics.median(seconds["lockstep run"]) / statistics.median(seconds["torchrun"])
    print(f"ratio          {ratio:.2f}   {min(ratios):.2f}–{max(ratios):.2f} over {options.rounds} rounds")
    print(f"lockstep --help median {statistics.median(helps):.2f} s   {min(helps):.2f}–{max(helps):.2f}")


if __name__ == "__main__":
    main()
