"""The program that each process of a benchmark runs. Its only argument is the task, as JSON."""

import sys
from contextlib import redirect_stdout

import torch

from lockstep.benchmark.measuring import Measuring
from lockstep.benchmark.task import Task
from lockstep.world.setup import leaving_at_the_end, setup_distributed


def main() -> None:
    task, terminal = Task.from_json(sys.argv[1]), sys.stdout
    torch.set_num_threads(1)
    with redirect_stdout(sys.stderr), leaving_at_the_end():  # whatever libraries print is not for the terminal
        world = setup_distributed(device=task.device)
        here = "one process" if world.size == 1 else f"{world.size} processes"

        def tell(words: str) -> None:
            if world.is_main:
                print(f"{here}: {words}", file=terminal, flush=True)

        Measuring(task, world, tell).measure()


if __name__ == "__main__":
    main()
