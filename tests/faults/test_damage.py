"""Whatever happens to the files of a checkpoint, it loads exactly as it was saved or is refused with a clear line."""

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint.checkpoint_store import CheckpointStore
from lockstep.checkpoint.manifest import CheckpointError
from lockstep.world.serialization import Shard, split_values
from tests.checkpoints import RUN_ID, save

FOREIGN_ID = "fedcba9876543210"
STEPS, BEST = (1, 2, 3), 2

Tree = dict[str, bytes]  # all files under a folder, by their relative paths
Content = tuple[Any, dict[str, tuple[torch.dtype, torch.Size, bytes]]]


def parts(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(3, 2, generator=generator)
    scalar = torch.rand((), generator=generator)
    return {
        "model": {"weight": torch.rand(6, 5, generator=generator), "half": rows.bfloat16(), "scalar": scalar},
        "optimizer": {"state": {"weight": {"momentum": torch.rand(7, generator=generator), "step": 3.5}}},
        "kept.whole": {"rows": Shard(rows, (0, 0), (3, 2)), "words": ["a", (1, None), {2: b"bytes"}]},
    }


def content_of(values: dict[str, Any]) -> Content:
    """Return something that is equal exactly if the values are, with the tensors' dtypes, shapes and bits."""
    form, tensors, shards = split_values(values)
    tensors |= {name: shard.local for name, shard in shards.items()}  # one rank: its shard is the whole tensor
    return form, {
        name: (tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, tensor in tensors.items()
    }


class Bench:
    """The checkpoints of two runs, which are restored after every try."""

    def __init__(self, folder: Path) -> None:
        self.ours, self.theirs = CheckpointStore(folder / "ours"), CheckpointStore(folder / "theirs")
        for step in STEPS:
            save(self.ours.folder, step, parts(step), {"words": step}, is_best=step <= BEST)
            save(self.theirs.folder, step, parts(step + 10), {"words": step}, is_best=step <= BEST, run_id=FOREIGN_ID)
        self.originals = {
            (store.manifest(step).run_id, step): (content_of(parts(step + offset)), store.manifest(step))
            for store, offset in ((self.ours, 0), (self.theirs, 10))
            for step in STEPS
        }
        self._trees = {store: _read(store.folder) for store in (self.ours, self.theirs)}

    def files(self) -> list[Path]:
        return [self.ours.folder / name for name in self._trees[self.ours]]

    def restore(self) -> None:
        for store, tree in self._trees.items():
            if _read(store.folder) != tree:
                shutil.rmtree(store.folder)
                for name, data in tree.items():
                    (store.folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (store.folder / name).write_bytes(data)

    def is_as_saved(self, step: int) -> bool:
        """Load a step: it must be exactly what the run that it names saved, or an error with a clear line."""
        try:
            found = self.ours.load(step)
        except CheckpointError as error:
            _check_line(error, self.ours.folder / f"step-{step}")
            return False
        assert (content_of(found.values), found.manifest) == self.originals[found.manifest.run_id, step]
        return found.manifest.run_id == RUN_ID

    def examine(self) -> bool:
        """Was any damage detected?"""
        good = [step for step in STEPS if self.is_as_saved(step)]
        passed_over: list[str] = []
        newest = self.ours.newest_intact(RUN_ID, passed_over.append)
        assert (newest.manifest.step if newest else None) == max(good, default=None)
        assert len(passed_over) == len([step for step in STEPS if not good or step > max(good)])
        try:
            assert self.ours.best() == BEST
        except CheckpointError as error:
            _check_line(error, self.ours.folder)
        return len(good) < len(STEPS)


def _check_line(error: CheckpointError, place: Path) -> None:
    text = str(error)
    assert text.startswith(str(place))
    assert text.isprintable()
    assert "manifest.json" in text or ".safetensors" in text or "renamed or replaced" in text


def _read(folder: Path) -> Tree:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def flip(bench: Bench, rng: random.Random) -> None:
    path = rng.choice(bench.files())
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 2, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def overwrite(bench: Bench, rng: random.Random) -> None:
    path = rng.choice(bench.files())
    data = bytearray(path.read_bytes())
    start = rng.randrange(len(data))
    stop = min(start + rng.choice([4, 16, 4096]), len(data))
    data[start:stop] = rng.choice([bytes(stop - start), rng.randbytes(stop - start)])
    path.write_bytes(data)


def truncate(bench: Bench, rng: random.Random) -> None:
    path = rng.choice(bench.files())
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def extend(bench: Bench, rng: random.Random) -> None:
    with rng.choice(bench.files()).open("ab") as file:
        file.write(rng.choice([b"\0", b"\n", b"}", rng.randbytes(9)]))


def remove(bench: Bench, rng: random.Random) -> None:
    rng.choice(bench.files()).unlink()


def swap_files(bench: Bench, rng: random.Random) -> None:
    one, other = rng.sample(bench.files(), 2)
    one_data, other_data = one.read_bytes(), other.read_bytes()
    one.write_bytes(other_data)
    other.write_bytes(one_data)


def swap_namesakes(bench: Bench, rng: random.Random) -> None:
    """Swap the same file of two checkpoints or two runs: sizes and tensor names match."""
    one = rng.choice(bench.files())
    other = rng.choice([path for path in bench.ours.folder.parent.rglob(one.name) if path != one])
    one_data, other_data = one.read_bytes(), other.read_bytes()
    one.write_bytes(other_data)
    if rng.random() < 0.5:
        other.write_bytes(one_data)


def swap_folders(bench: Bench, rng: random.Random) -> None:
    one, other = rng.sample([store.path(step) for store in (bench.ours, bench.theirs) for step in STEPS], 2)
    between = bench.ours.folder / "between"
    one.rename(between)
    other.rename(one)
    between.rename(other)


def copy_folder(bench: Bench, rng: random.Random) -> None:
    one, other = rng.sample([store.path(step) for store in (bench.ours, bench.theirs) for step in STEPS], 2)
    shutil.rmtree(one)
    shutil.copytree(other, one)


def misdirect(bench: Bench, rng: random.Random) -> None:
    step = rng.randrange(5)
    commit = bench.ours.manifest(step).commit if step in STEPS else "0" * 16
    text = rng.choice([f"step-{step} {commit}\n", f"step-{step}\n", f"../theirs/step-{step} {commit}", "", "\0" * 300])
    (bench.ours.folder / rng.choice(["LATEST", "BEST"])).write_text(text)


DAMAGES: list[Callable[[Bench, random.Random], None]] = [
    flip, flip, flip, overwrite, truncate, extend, remove, swap_files, swap_namesakes, swap_folders, copy_folder,
    misdirect,
]  # fmt: skip


def damage_often(folder: Path, num_tries: int, seed: int) -> None:
    bench = Bench(folder)
    assert not bench.examine()
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    for _ in range(num_tries):
        damage = rng.choice(DAMAGES)
        damage(bench, rng)
        outcomes["detected" if bench.examine() else "harmless: a pointer, another run, or no change"] += 1
        bench.restore()
    print(f"{num_tries} damages: {dict(outcomes)}; none went unnoticed")
    assert outcomes["detected"] > num_tries / 2


def test_damage_is_detected_or_harmless(tmp_path: Path) -> None:
    damage_often(tmp_path, 300, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_damages_are_detected_or_harmless(tmp_path: Path) -> None:
    damage_often(tmp_path, 10_000, seed=2)
