"""What a step costs over the hand-written loop: lockstep beside Accelerate, Fabric and Lightning, where installed.

    python bench/peer_cost.py [--rounds 15] [--steps 300]

One process, one thread, on the CPU: the tiny MLP with ready-made batches, AdamW. Every variant once a round; the ratio
is the median of the rounds' ratios to the hand-written loop. Lightning's Trainer is timed from the end of its first
step to that of its last.
"""

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from loop import LockstepLoop
from one_process import TINY_BATCH, Ready, hand_written
from torch.utils.data import DataLoader
from workloads import Workload, workload

from lockstep.world.world import World

Loop = Callable[[], float]  # makes its steps; returns the seconds that one took


def timed(steps: int, run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) / steps


def with_lockstep(work: Workload, steps: int, lanes: int, **options: str) -> Loop:
    loop = LockstepLoop(work, World(), TINY_BATCH, lanes, partial(torch.optim.AdamW, lr=1e-4), **options)
    return partial(timed, steps, partial(loop.advance, steps))


def with_accelerate(work: Workload, batches: Any, steps: int) -> Loop:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    bare = work.make_model()
    model, optimizer, loader = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=1e-4), batches)

    def run() -> None:
        for inputs, labels in loader:
            accelerator.backward(F.cross_entropy(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return partial(timed, steps, run)


def with_fabric(work: Workload, batches: Any, steps: int) -> Loop:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    bare = work.make_model()
    model, optimizer = fabric.setup(bare, torch.optim.AdamW(bare.parameters(), lr=1e-4))
    loader = fabric.setup_dataloaders(batches)

    def run() -> None:
        for inputs, labels in loader:
            fabric.backward(F.cross_entropy(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return partial(timed, steps, run)


def with_lightning(work: Workload, batches: Any, steps: int) -> Loop:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.make_model()
            self.ends: list[float] = []

        def training_step(self, batch: Any) -> torch.Tensor:
            inputs, labels = batch
            return F.cross_entropy(self.model(inputs), labels)

        def on_train_batch_end(self, *_: Any) -> None:
            self.ends.append(time.perf_counter())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    module = Module()

    def run() -> float:
        module.ends = []
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, batches)
        assert len(module.ends) == steps
        return (module.ends[-1] - module.ends[0]) / (steps - 1)

    return run


def interleave(loops: Mapping[str, Loop], rounds: int) -> dict[str, list[float]]:
    """Seconds a step, by round; the first round warms up and does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(rounds + 1):
        for name, loop in loops.items():
            value = loop()
            if number:
                seconds[name].append(value)
    return seconds


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=15)
    arguments.add_argument("--steps", type=int, default=300)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    steps = options.steps
    work = workload("tiny", TINY_BATCH * steps)
    batches = DataLoader(Ready(work, TINY_BATCH), batch_size=None)
    loops: dict[str, Loop] = {
        "hand-written": partial(timed, steps, hand_written(work, batches)),
        "hand-written again": partial(timed, steps, hand_written(work, batches)),
        "lockstep, 1 lane": with_lockstep(work, steps, 1),
        "lockstep, 1 lane, not looking for NaN": with_lockstep(work, steps, 1, on_nonfinite="ignore"),
        "lockstep, 8 lanes": with_lockstep(work, steps, 8),
    }
    if find_spec("accelerate"):
        loops["Accelerate"] = with_accelerate(work, batches, steps)
    if find_spec("lightning"):
        loops["Fabric"] = with_fabric(work, batches, steps)
        loops["Lightning's Trainer"] = with_lightning(work, batches, steps)
    seconds = interleave(loops, options.rounds)
    print("| tiny MLP, one process | ms a step | ratio | range by round |\n|---|---|---|---|")
    base = next(iter(seconds.values()))
    for name, values in seconds.items():
        ratios = sorted(value / reference for value, reference in zip(values, base, strict=True))
        spread = f"{ratios[0]:.2f}–{ratios[-1]:.2f}"
        print(f"| {name} | {1e3 * statistics.median(values):.3f} | {statistics.median(ratios):.3f} | {spread} |")


if __name__ == "__main__":
    main()
