"""One process: a step of the tiny MLP against a hand-written loop, and the lane tax, 8 lanes against one.

    .venv/bin/python bench/one_process.py [--rounds 40] [--steps 300] [--tiny]

One thread, AdamW. The hand-written loop takes ready-made batches from a DataLoader with `batch_size=None`, the cheapest
way; a shuffling DataLoader over the samples is timed too, because that is what people usually write.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from lockstep.bench.bench_models import Workload, build_workload
from lockstep.bench.contender_loops import LockstepLoop
from lockstep.bench.interleaved_timing import interleave, timing_table
from lockstep.world.world import World

TINY_BATCH = 32
LANE_TAX_BATCHES = {"gpt-9M": 16, "conv": 64, "mlp-9M": 64, "mlp": 64}


class ReadyBatches(Dataset[tuple[torch.Tensor, ...]]):
    """Batches that are already cut."""

    def __init__(self, work: Workload, batch: int) -> None:
        self.batches = list(zip(*(tensor.split(batch) for tensor in work.data.tensors), strict=True))

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return self.batches[index]


def hand_written_steps(work: Workload, batches: DataLoader) -> Callable[[], None]:  # type: ignore[type-arg]
    model = work.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def run() -> None:
        for inputs, labels in batches:
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return run


def lockstep_steps(work: Workload, batch: int, lanes: int, steps: int, **options: str) -> Callable[[], None]:
    loop = LockstepLoop(work, World(), batch, lanes, partial(torch.optim.AdamW, lr=1e-4), **options)
    return partial(loop.advance, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tiny", action="store_true", help="only the tiny step, without the lane tax")
    options = parser.parse_args()
    torch.set_num_threads(1)

    steps = options.steps
    work = build_workload("tiny", TINY_BATCH * steps)
    variants = {
        "hand-written": hand_written_steps(work, DataLoader(ReadyBatches(work, TINY_BATCH), batch_size=None)),
        "lockstep, 1 lane": lockstep_steps(work, TINY_BATCH, 1, steps),
        "lockstep, 1 lane, not looking for NaN": lockstep_steps(work, TINY_BATCH, 1, steps, on_nonfinite="ignore"),
        "fast, 1 lane": lockstep_steps(work, TINY_BATCH, 1, steps, determinism="fast"),
        "lockstep, 8 lanes": lockstep_steps(work, TINY_BATCH, 8, steps),
        "hand-written, shuffling DataLoader": hand_written_steps(work, DataLoader(work.data, TINY_BATCH, shuffle=True)),
    }
    print(timing_table(f"tiny MLP, one process, batch {TINY_BATCH}", interleave(variants, options.rounds, steps)))
    for name, batch in ({} if options.tiny else LANE_TAX_BATCHES).items():
        work = build_workload(name, batch * 4)
        variants = {f"{lanes} lanes": lockstep_steps(work, batch, lanes, 4) for lanes in (1, 2, 4, 8)}
        print(timing_table(f"\nlane tax: {name}, one process, batch {batch}", interleave(variants, 6, 4)), flush=True)


if __name__ == "__main__":
    main()
