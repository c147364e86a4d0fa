"""The cost of watching for hangs: a step of plain PyTorch with `--hang-limit 1`, and with `--hang-limit off`.

    .venv/bin/python bench/hang_detection.py [--rounds 12] [--seconds 4] [--processes 2]

Each round runs every variant once, in turn, as a job of its own. With an optimizer, quick steps are signs of life, and
nothing else is looked at. Without one, the agent asks each rank for its collectives and stacks about once per limit,
here thirty times as often as by default. `off` is measured twice, to show how much two equal variants differ. On a busy
machine, the processor time of a step says more than its duration.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from lockstep.bench.interleaved_timing import time_ratio

SCRIPT = """
import sys, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(8)]))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
batch, is_training, seconds = torch.ones(64, 128), sys.argv[1] == "training", float(sys.argv[2])

def step():
    model(batch).sum().backward()
    if is_training:
        optimizer.step()
    model.zero_grad()

for _ in range(50):
    step()
num_steps = 0
began, began_cpu = time.perf_counter(), time.process_time()
goes_on = torch.ones(1)
while True:
    if num_steps % 50 == 0:  # all ranks make the same number of steps
        goes_on.fill_(time.perf_counter() < began + seconds)
        dist.broadcast(goes_on, src=0)
        if not goes_on:
            break
    step()
    num_steps += 1
if dist.get_rank() == 0:
    spent = time.perf_counter() - began, time.process_time() - began_cpu
    print("step", *(each / num_steps for each in spent), flush=True)
"""


def step_s(script: Path, processes: int, hang_limit: str, kind: str, seconds: float) -> tuple[float, float]:
    """Return the duration and the processor time of a step in one job."""
    options = ["-n", str(processes), "--hang-limit", hang_limit]
    command = [sys.executable, "-m", "lockstep", "run", *options, str(script), kind, str(seconds)]
    job = subprocess.run(command, capture_output=True, text=True, check=True)
    assert job.stderr == "", job.stderr
    _, duration_s, cpu_s = job.stdout.split()
    return float(duration_s), float(cpu_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each job")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    variants = {"off": "off", "off, again": "off", "on": "1"}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT)
        for kind in ("training", "no optimizer"):
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
            for _ in range(options.rounds):
                for name, hang_limit in variants.items():
                    times[name].append(step_s(script, options.processes, hang_limit, kind, options.seconds))
            for index, what in enumerate(("duration", "processor time")):
                of = {name: [each[index] for each in measured] for name, measured in times.items()}
                print(f"{kind}, {what}: off {1e3 * median(of['off']):.2f} ms a step")
                for name in ("off, again", "on"):
                    ratio = time_ratio(of[name], of["off"])
                    print(f"  {name}: ×{ratio.median:.3f} ({ratio.low:.2f}-{ratio.high:.2f})")


if __name__ == "__main__":
    main()
