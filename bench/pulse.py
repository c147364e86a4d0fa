"""What showing one's pulse costs: a step of the tiny MLP in a supervised process against one that nobody supervises.

    .venv/bin/python bench/pulse.py [--rounds 60] [--steps 300]

One process, one thread, one lane, AdamW. The bar is 1.01. Without a pulse is measured twice: so it shows how far two
equal variants are apart on this machine. The agent's reading is not in it: it reads ten times a second, in a process of
its own.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from measure import interleave, table
from one_process import TINY_BATCH, lockstep
from torch.optim.optimizer import register_optimizer_step_post_hook
from workloads import workload

from lockstep.supervision import pulse


def supervised(run: Callable[[], None], page: pulse.Page) -> Callable[[], None]:
    """The same, with what a worker under an agent does."""

    def with_pulse() -> None:
        pulse._page = page
        hook = register_optimizer_step_post_hook(lambda *_: pulse.count_optimizer_step())
        run()
        hook.remove()
        pulse._page = None

    return with_pulse


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=60)
    arguments.add_argument("--steps", type=int, default=300)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        page = pulse.Page(Path(folder) / "rank-0.pulse", create=True)
        page.begin()
        work = workload("tiny", TINY_BATCH * options.steps)
        variants = {
            "without": lockstep(work, TINY_BATCH, 1, options.steps),
            "without, again": lockstep(work, TINY_BATCH, 1, options.steps),
            "with": supervised(lockstep(work, TINY_BATCH, 1, options.steps), page),
        }
        print(table(f"tiny MLP, one process, batch {TINY_BATCH}", interleave(variants, options.rounds, options.steps)))


if __name__ == "__main__":
    main()
