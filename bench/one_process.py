"""A step of the tiny MLP on one process against the hand-written loop; and the lane tax: 8 lanes against one.

    .venv/bin/python bench/one_process.py [--rounds 40] [--steps 300] [--tiny]

One thread, AdamW. The hand-written loop takes ready-made batches from a DataLoader with `batch_size=None`, the cheapest
way there is; a shuffling DataLoader over the samples stands beside it, because that is what people write.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from loop import LockstepLoop
from measure import interleave, table
from torch.utils.data import DataLoader, Dataset
from workloads import workload

from lockstep.benchmark.workloads import Workload
from lockstep.world.world import World

TINY_BATCH = 32
TAXED = {"gpt-9M": 16, "conv": 64, "mlp-9M": 64, "mlp-0.15M": 64}


class Ready(Dataset[tuple[torch.Tensor, ...]]):
    """Batches that only need to be handed out."""

    def __init__(self, work: Workload, batch: int) -> None:
        self.batches = list(zip(*(tensor.split(batch) for tensor in work.data.tensors), strict=True))

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return self.batches[index]


def hand_written(work: Workload, batches: DataLoader) -> Callable[[], None]:  # type: ignore[type-arg]
    model = work.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def run() -> None:
        for inputs, labels in batches:
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return run


def lockstep(work: Workload, batch: int, lanes: int, steps: int, **options: str) -> Callable[[], None]:
    loop = LockstepLoop(work, World(), batch, lanes, partial(torch.optim.AdamW, lr=1e-4), **options)
    return partial(loop.advance, steps)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=40)
    arguments.add_argument("--steps", type=int, default=300)
    arguments.add_argument("--tiny", action="store_true", help="the tiny step alone, without the lane tax")
    options = arguments.parse_args()
    torch.set_num_threads(1)

    steps = options.steps
    work = workload("tiny", TINY_BATCH * steps)
    variants = {
        "hand-written": hand_written(work, DataLoader(Ready(work, TINY_BATCH), batch_size=None)),
        "lockstep, 1 lane": lockstep(work, TINY_BATCH, 1, steps),
        "lockstep, 1 lane, not looking for NaN": lockstep(work, TINY_BATCH, 1, steps, on_nonfinite="ignore"),
        "fast, 1 lane": lockstep(work, TINY_BATCH, 1, steps, determinism="fast"),
        "lockstep, 8 lanes": lockstep(work, TINY_BATCH, 8, steps),
        "hand-written, shuffling DataLoader": hand_written(work, DataLoader(work.data, TINY_BATCH, shuffle=True)),
    }
    print(table(f"tiny MLP, one process, batch {TINY_BATCH}", interleave(variants, options.rounds, steps)))
    for name, batch in ({} if options.tiny else TAXED).items():
        work = workload(name, batch * 4)
        variants = {f"{lanes} lanes": lockstep(work, batch, lanes, 4) for lanes in (1, 2, 4, 8)}
        print(table(f"\nlane tax: {name}, one process, batch {batch}", interleave(variants, 6, 4)), flush=True)


if __name__ == "__main__":
    main()
