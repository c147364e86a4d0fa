"""A disk that is full, read-only or gone costs saves, which is said, but neither the run nor what was saved before."""

import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.checkpoint.ledger import read_ledger
from lockstep.checkpoint.manifest import CheckpointError
from lockstep.checkpoint.store import Store
from lockstep.events.jsonl import read_lines
from lockstep.train.run import Run
from lockstep.world.world import World
from tests.commands import run as run_command

DISK_BYTES = 4 * 2**20
WIDTH = 4000  # two files of 32 pages in a checkpoint
STEPS = 6
PAGE = 4096

Acts = Mapping[int, Callable[[], object]]  # what happens to the disk before which step


def train(folder: Path | None, acts: Acts | None = None, steps: int = STEPS) -> str:
    """Its digest. Every step is saved, and saved before the next one begins."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.rand(96, 4, generator=generator), torch.arange(96) % 3)
    run = Run(folder, World(), seed=3, sinks=[])
    model = run.prepare(nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3)))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    try:
        for step in run.open_steps(run.loader(data, 16), steps=steps):
            for thread in threading.enumerate():
                if thread.name == "lockstep-save":
                    thread.join()
            (acts or {}).get(step.number, lambda: None)()
            step.accumulate(lambda m, batch: (F.cross_entropy(m(batch[0]), batch[1], reduction="sum"), 16), model)
            step.update(optimizer)
            run.save()
        return run.finish()
    finally:
        run.close()


@pytest.fixture(scope="module")
def digest() -> str:
    """What an untroubled run comes to."""
    return train(None)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none") as place:
        yield place


class mounted:
    def __init__(self, place: Path, *arguments: str) -> None:
        self._place, self._arguments = place, arguments

    def __enter__(self) -> Path:
        self._place.mkdir(exist_ok=True)
        made = subprocess.run(["mount", *self._arguments, str(self._place)], capture_output=True, check=False)
        if made.returncode != 0:
            pytest.skip("only root may mount a disk of its own")
        return self._place

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "-l", str(self._place)], check=True)


def fill(place: Path, left_bytes: int = 0) -> None:
    """All but so much of a disk."""
    try:
        with (place / "ballast").open("wb", buffering=0) as file:
            while file.write(bytes(PAGE)):
                pass
    except OSError:
        pass
    size = (place / "ballast").stat().st_size
    with (place / "ballast").open("ab") as file:
        file.truncate(size - left_bytes)


def make_room(place: Path) -> None:
    (place / "ballast").unlink()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert all(text.isprintable() for text in found)
    return found


# How far a save comes: no file, some of the first one, all but the manifest, all but the pointer …
@pytest.mark.parametrize("left_bytes", [0, *(pages * PAGE for pages in (20, 40, 64, 65, 66, 67))])
def test_a_full_disk(small_disk: Path, digest: str, caplog: pytest.LogCaptureFixture, left_bytes: int) -> None:
    run = small_disk / "run"
    store = Store(run / "checkpoints")
    found: list[int] = []

    def look() -> None:
        newest = store.newest_intact(store.manifest(1).run_id, found.append)  # type: ignore[arg-type]
        assert newest is not None
        found.append(newest.manifest.step)

    acts = {3: lambda: fill(small_disk, left_bytes), 4: look, 5: lambda: (look(), make_room(small_disk))}
    assert train(run, acts) == digest
    assert found in ([2, 2], [3, 3], [2, 3], [3, 4]), found
    told = [text for text in warnings(caplog) if text.startswith("step ")]
    assert told, "not a word of a disk that is full"
    assert all("No space left on device" in text for text in told)
    assert all(text.startswith(("step 3", "step 4")) for text in told)
    for step, newest in zip((3, 4), found, strict=True):
        is_told_lost = any(text.startswith(f"step {step} could not be saved, and training goes on:") for text in told)
        assert is_told_lost == (newest < step)
    assert [text for text in warnings(caplog) if "lines are being lost" in text] in (
        [],
        [f"{run}/events.jsonl: lines are being lost: No space left on device"],
    )
    assert store.steps()[0] == STEPS
    assert all(store.load(step) for step in store.steps())
    assert {path.name for path in store.folder.iterdir()} == {"LATEST", *(f"step-{step}" for step in store.steps())}
    events = list(read_lines(run / "events.jsonl"))
    assert {"start", "checkpoint", "end"} <= {event["kind"] for event in events}
    lines = {line["commit"]: line for line in read_ledger(run / "ledger.jsonl")}
    commit = store.manifest(STEPS).commit
    batches: list[int] = []
    while commit is not None:  # back to the beginning, with no line missing
        batches = [*(batch for span in lines[commit]["spans"] for batch in range(*span["batches"])), *batches]
        commit = lines[commit]["parent"]
    assert batches == list(range(STEPS))


SCRIPT = """
import sys, pathlib
from tests.faults.test_disk_trouble import *
run, disk = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
import lockstep
def main(world):
    print("digest", train(run, {6: lambda: fill(disk)} if "fill" in sys.argv else {}))
lockstep.launch(main, device="cpu")
"""


def test_an_end_that_cannot_be_saved_is_a_failure_and_the_run_can_go_on(
    small_disk: Path, tmp_path: Path, digest: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(small_disk / "run"), str(small_disk)]
    root = Path(__file__).parents[2]
    environment = {"PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"}
    failed = run_command([*command, "fill"], tmp_path, environment)
    assert failed.code == 3, failed.err
    assert "step 6, the run's end, could not be saved" in failed.err
    assert "Traceback" not in failed.err
    assert Store(small_disk / "run" / "checkpoints").steps() == [5, 4, 3]
    make_room(small_disk)
    again = run_command(command, tmp_path, environment)
    assert again.code == 0, again.err
    assert f"digest {digest}" in again.out


def test_a_folder_that_becomes_read_only(tmp_path: Path, digest: str, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    mount = mounted(checkpoints, "--bind", str(checkpoints))

    def forbid() -> None:
        mount.__enter__()
        subprocess.run(["mount", "-o", "remount,ro,bind", str(checkpoints)], check=True)

    assert train(tmp_path / "run", {3: forbid, 5: lambda: mount.__exit__()}) == digest
    told = warnings(caplog)
    assert len(told) == 2
    assert all("could not be saved, and training goes on: rank 0: Read-only file system" in text for text in told)
    assert Store(checkpoints).steps() == [6, 5, 2]


def test_a_run_folder_that_vanishes_and_comes_back(
    tmp_path: Path, digest: str, caplog: pytest.LogCaptureFixture
) -> None:
    run, away = tmp_path / "run", tmp_path / "away"
    assert train(run, {3: lambda: run.rename(away), 5: lambda: away.rename(run)}) == digest
    told = warnings(caplog)
    assert len(told) == 2
    assert all("could not be saved, and training goes on: rank 0: No such file or directory" in text for text in told)
    assert Store(run / "checkpoints").steps() == [6, 5, 2]
    assert {line["step"] for line in read_ledger(run / "ledger.jsonl")} == {1, 2, 5, 6}


def test_a_run_folder_that_vanishes_for_good(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    with pytest.raises(CheckpointError, match="step 6, the run's end, could not be saved"):
        train(run, {3: lambda: shutil.rmtree(run)})
    assert not run.exists(), "what somebody removed was made again"
    assert len(warnings(caplog)) == 5, "a word for each save that failed; the last one was tried twice"


def test_checkpoints_that_vanish_are_made_again(tmp_path: Path, digest: str, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    assert train(run, {4: lambda: shutil.rmtree(run / "checkpoints")}) == digest
    assert Store(run / "checkpoints").steps() == [6, 5, 4]
    assert not warnings(caplog)
