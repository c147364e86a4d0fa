"""The cost of saving and resuming.

    .venv/bin/python bench/checkpoint.py [--rounds 9] [--megabytes 200] [--device cpu]

stall     how long an asynchronous save delays a step, against a blocking torch.save of the same state
write     how fast the background writes (with hashes and flushes), against plain bytes to the same disk
load      reading with every hash checked, against without; once from the disk, once from the page cache
resume    from a script's start to its first step, at the last step of a long epoch against its first
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.checkpoint.async_saver import SaveContent, Saver
from lockstep.checkpoint.checkpoint_store import CheckpointStore, Retention
from lockstep.errors import Stopped
from lockstep.train.run import Run
from lockstep.world.world import World

Seconds = dict[str, list[float]]


def make_state(megabytes: int, device: str) -> dict[str, dict[str, Tensor]]:
    """A model and its Adam's two moments: three files of equal size, 16 tensors each."""
    elements = megabytes * 2**20 // 3 // 16 // 4
    parts = ("model", "first_moment", "second_moment")
    return {part: {f"{index}.weight": torch.randn(elements, device=device) for index in range(16)} for part in parts}


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def forget(path: Path) -> None:
    """Drop a file from the page cache, so that the next reader goes to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def measure_saving(folder: Path, state: Mapping[str, Mapping[str, Tensor]], rounds: int) -> None:
    saver = Saver(folder / "checkpoints", World(), "0" * 16, attempt=1)
    seconds: Seconds = {name: [] for name in ("torch.save", "torch.save + fsync", "stall", "write", "plain write")}
    num_bytes = sum(tensor.nbytes for part in state.values() for tensor in part.values())
    content = os.urandom(2**20) * (num_bytes // 2**20)
    for number in range(rounds + 1):  # the first round allocates the copies, and is not counted
        path = folder / f"{number}.pt"
        blocking = timed(lambda path=path: torch.save(state, path))  # type: ignore[misc]
        flushing = timed(lambda path=path: flush(path))  # type: ignore[misc]
        path.unlink()
        stall = timed(
            lambda number=number: saver.save(
                SaveContent(number + 1, state, {}, late=("first_moment", "second_moment")), Retention(1)
            )
        )  # type: ignore[misc]
        outcome = saver.wait()
        assert outcome is not None and outcome.problem is None, outcome
        plain = folder / f"{number}.bin"
        writing = timed(lambda plain=plain: (plain.write_bytes(content), flush(plain)))  # type: ignore[misc]
        plain.unlink()
        if number:
            for name, value in zip(
                seconds, (blocking, blocking + flushing, stall, outcome.write_s, writing), strict=True
            ):
                seconds[name].append(value)
    saver.close()
    print(f"\nsaving {num_bytes / 2**20:.0f} MiB, {rounds} rounds: median (range)")
    for name, values in seconds.items():
        rate = num_bytes / 2**20 / statistics.median(values)
        print(f"  {name:<20} {summary(values)}  {rate:,.0f} MiB/s")
    print(f"  stall / torch.save          {ratio(seconds['stall'], seconds['torch.save'])}")
    print(f"  stall / torch.save + fsync  {ratio(seconds['stall'], seconds['torch.save + fsync'])}")
    print(f"  write / plain write         {ratio(seconds['write'], seconds['plain write'])}")


def measure_loading(folder: Path, rounds: int) -> None:
    store = CheckpointStore(folder / "checkpoints")
    (step,) = store.steps()
    files = sorted(store.path(step).glob("*.safetensors"))
    own = {file.name: {name: torch.empty_like(t) for name, t in load_file(file).items()} for file in files}

    def copy(tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        for file, into in own.items():
            for name, tensor in into.items():
                tensor.copy_(tensors[file][name])

    def verified() -> None:
        copy({f"{part}.safetensors": value for part, value in store.load(step).values.items()})

    def unverified() -> None:
        copy({file.name: load_file(file) for file in files})

    for where in ("disk", "page cache"):
        seconds: Seconds = {"unverified": [], "verified": []}
        for number in range(rounds + 1):
            for name, load in (("unverified", unverified), ("verified", verified)):
                if where == "disk":
                    for file in files:
                        forget(file)
                value = timed(load)
                if number:
                    seconds[name].append(value)
        print(f"\nloading from the {where}, into existing tensors: median (range)")
        for name, values in seconds.items():
            print(f"  {name:<20} {summary(values)}")
        print(f"  verified / unverified       {ratio(seconds['verified'], seconds['unverified'])}")


class Numbers(Dataset[Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


def measure_resuming(folder: Path, rounds: int, batch: int = 8, steps: int = 4000) -> None:
    """An epoch of `steps` steps, interrupted after the first and before the last."""

    def train(name: str, stop_after: int) -> float:
        began = time.perf_counter()
        run = Run(folder / name, World(), sinks=[])
        run.stop_after = stop_after
        model = run.prepare(nn.Linear(1, 1))
        optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=1e-9))
        first = 0.0
        try:
            for step in run.steps(run.loader(Numbers(batch * steps), batch, lanes=1), epochs=1, finish=False):
                first = first or time.perf_counter() - began
                step.accumulate(lambda model, rows: (model(rows).sum(), len(rows)), model)
                step.update(optimizer)
        except Stopped:
            pass
        run.close()
        return first

    for name, stop in (("early", 1), ("late", steps - 2 - rounds)):
        train(name, stop)
    seconds: Seconds = {"first step": [], "last step": []}
    for number in range(rounds):  # each trains one step further than the last
        seconds["first step"].append(train("early", 2 + number))
        seconds["last step"].append(train("late", steps - 1 - rounds + number))
    print(f"\nresuming in an epoch of {steps} steps: median (range)")
    for name, values in seconds.items():
        print(f"  at the {name:<13} {summary(values)}")
    print(f"  last / first                {ratio(seconds['last step'], seconds['first step'])}")


def summary(values: list[float]) -> str:
    return f"{1e3 * statistics.median(values):8.1f} ms ({1e3 * min(values):.1f}–{1e3 * max(values):.1f})"


def ratio(values: list[float], base: list[float]) -> str:
    ratios = [value / reference for value, reference in zip(values, base, strict=True)]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f}–{max(ratios):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        measure_saving(folder, make_state(options.megabytes, options.device), options.rounds)
        measure_loading(folder, options.rounds)
        measure_resuming(folder, options.rounds)


if __name__ == "__main__":
    main()
