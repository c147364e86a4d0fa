"""The cost of a heartbeat: a step of the tiny MLP in a supervised process against an unsupervised one.

    .venv/bin/python bench/heartbeat.py [--rounds 60] [--steps 300]

One process, one thread, one lane, AdamW. The target ratio is 1.01. The variant without a heartbeat is measured twice,
to show how much two equal variants differ on this machine. The agent's reads are not included: it reads ten times a
second, in its own process.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from one_process import TINY_BATCH, lockstep_steps
from torch.optim.optimizer import register_optimizer_step_post_hook

from lockstep.bench.bench_models import build_workload
from lockstep.bench.interleaved_timing import interleave, timing_table
from lockstep.supervision import heartbeat


def supervised(run: Callable[[], None], page: heartbeat.HeartbeatPage) -> Callable[[], None]:
    """The same steps, with the heartbeat that a supervised worker writes."""

    def with_heartbeat() -> None:
        heartbeat._of_this_process._page = page
        hook = register_optimizer_step_post_hook(lambda *_: heartbeat.count_optimizer_step())
        run()
        hook.remove()
        heartbeat._of_this_process._page = None

    return with_heartbeat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        page = heartbeat.HeartbeatPage(Path(folder) / "rank-0.heartbeat", create=True)
        page.begin()
        work = build_workload("tiny", TINY_BATCH * options.steps)
        variants = {
            "without": lockstep_steps(work, TINY_BATCH, 1, options.steps),
            "without, again": lockstep_steps(work, TINY_BATCH, 1, options.steps),
            "with": supervised(lockstep_steps(work, TINY_BATCH, 1, options.steps), page),
        }
        timings = interleave(variants, options.rounds, options.steps)
    print(timing_table(f"tiny MLP, one process, batch {TINY_BATCH}", timings))


if __name__ == "__main__":
    main()
