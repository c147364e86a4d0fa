"""Snapshots in one process: a run that dies resumes from memory, with the same result and the same ledger."""

import os
import random
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from lockstep.checkpoint.checkpoint_store import CheckpointStore
from lockstep.checkpoint.ledger import read_ledger
from lockstep.checkpoint.manifest import read_manifest
from lockstep.ckpt.sample_audit import audit_samples
from lockstep.data.lane_loader import LaneLoader
from lockstep.errors import Stopped
from lockstep.events.jsonl import read_jsonl
from lockstep.events.run_folder import RunFolder
from lockstep.train.resume import memory_snapshots
from lockstep.train.resume.checkpoint_policy import CheckpointPolicy
from lockstep.train.resume.progress import ConsumedSamples
from lockstep.train.run import Run
from lockstep.world.world import World
from tests.classification import loss
from tests.faults.disk_runs import fill, mounted

STEPS = 11
DISK_EVERY = 4


class Stream(IterableDataset[Sequence[Tensor]]):
    def __iter__(self) -> Iterator[Sequence[Tensor]]:
        yield from ((torch.full((4,), number / 100), torch.tensor(number % 3)) for number in range(80))


INDEXED = TensorDataset(torch.randn(80, 4, generator=torch.Generator().manual_seed(0)), torch.arange(80) % 3)
DATA = {"indexed": INDEXED, "stream": Stream()}


class Death(Exception):
    """Simulates a kill: nothing is saved, waited for or removed after it."""


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run as under an agent that restarts, with a snapshot after every step; return the folder in memory."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv("LOCKSTEP_MEMORY", str(folder))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    for name in ("_FIRST_AFTER_S", "_MIN_INTERVAL_S"):
        monkeypatch.setattr(memory_snapshots, name, 0.0)
    monkeypatch.setattr(memory_snapshots, "_MAX_COST", float("inf"))
    return folder


def train(folder: Path, die_in: int | None = None, stop_after: int | None = None, **options: Any) -> str:
    """Train and return the digest; every save has finished before the step's body ends."""
    checkpoints = options.get("checkpoints", CheckpointPolicy(DISK_EVERY))
    run = Run(folder, World(), seed=1, sinks=[])
    run.stop_after = stop_after
    model = run.prepare(nn.Linear(4, 3))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    loader = run.loader(DATA[options.get("data", "indexed")], 16, lanes=4)
    try:
        for step in run.steps(loader, steps=STEPS, checkpoints=checkpoints, finish=False):
            for thread in threading.enumerate():
                if thread.name == "lockstep-save":
                    thread.join()
            options.get("acts", {}).get(step.number, lambda: None)()
            if step.number == die_in:
                raise Death
            step.accumulate(loss, model)
            step.update(optimizer)
        return run.finish()
    except (Death, Stopped) as end:
        run.close(abandon=isinstance(end, Death))
        return run.digest()


def die(folder: Path, in_step: int, **options: Any) -> None:
    train(folder, die_in=in_step, **options)


def resumed(folder: Path) -> list[str | None]:
    """Return what each attempt has resumed from, without the folders above."""
    starts = [event["resumed"] for event in read_jsonl(folder / "events.jsonl") if event["kind"] == "start"]
    return [None if path is None else "/".join(Path(path).parts[-2:]) for path in starts]


def incident_texts(folder: Path) -> list[str]:
    return [event["text"] for event in read_jsonl(folder / "events.jsonl") if event["kind"] == "incident"]


def own(memory: Path, besides: str = "") -> Path:
    (folder,) = (path for path in memory.iterdir() if path.name != besides)
    return folder


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the digests of undisturbed runs without snapshots."""
    place = tmp_path_factory.mktemp("undisturbed")
    return {kind: train(place / kind, data=kind, checkpoints=CheckpointPolicy(memory=False)) for kind in DATA}


def is_kept(step: int, start: int) -> bool:
    """Is the state after `step` on disk or in memory, in an attempt that resumed from `start`?

    An attempt's first step only measures the size of a snapshot. In the two steps after a checkpoint on disk a snapshot
    would gain too little, so none is taken.
    """
    on_disk = step // DISK_EVERY * DISK_EVERY
    return step == on_disk or (step > start + 1 and (on_disk == 0 or step > on_disk + 2))


def newest_kept(start: int, die_in: int) -> int:
    """Return the step that the next attempt resumes from."""
    return max([start, *(step for step in range(start + 1, die_in) if is_kept(step, start))])


@pytest.mark.parametrize("data", list(DATA))
@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_death_in_any_step_loses_nothing_that_was_kept(
    tmp_path: Path, memory: Path, digest: dict[str, str], data: str, step: int
) -> None:
    folder = tmp_path / "run"
    next_step = min(step + 1, STEPS)
    die(folder, step, data=data)
    die(folder, next_step, data=data)
    assert train(folder, data=data) == digest[data]
    assert not list(memory.iterdir())
    starts = [event["step"] for event in read_jsonl(folder / "events.jsonl") if event["kind"] == "start"]
    second = newest_kept(0, step)
    assert starts == [0, second, newest_kept(second, next_step)]
    found = audit_samples(folder)
    assert not found.faults
    (turn,) = found.turns
    assert (turn.batches.start, turn.batches.stop) == (0, STEPS)
    assert [line["step"] for line in read_ledger(folder / "ledger.jsonl")] == [4, 8, 11]


def test_only_the_newest_is_kept_with_its_history(tmp_path: Path, memory: Path) -> None:
    folder = tmp_path / "run"
    die(folder, 9, checkpoints=CheckpointPolicy(5))
    store = CheckpointStore(own(memory))
    assert store.steps() == [8]
    assert own(memory).stat().st_mode & 0o777 == 0o700
    on_disk = CheckpointStore(folder / "checkpoints").manifest(5)
    ledger = store.manifest(8).facts["ledger"]
    assert ledger["parent"] == on_disk.commit
    assert [span["batches"] for span in ledger["spans"]] == [[5, 8]]
    assert [line["step"] for line in read_ledger(folder / "ledger.jsonl")] == [5]


def test_it_is_removed_when_the_run_stops_saved(tmp_path: Path, memory: Path, digest: dict[str, str]) -> None:
    folder = tmp_path / "run"
    train(folder, stop_after=7)
    assert not list(memory.iterdir())
    assert train(folder) == digest["indexed"]
    assert resumed(folder) == [None, "checkpoints/step-7"]


def test_a_snapshot_is_not_a_save(tmp_path: Path, memory: Path, digest: dict[str, str]) -> None:
    folder = tmp_path / "run"
    die(folder, 8)
    train(folder, stop_after=7)  # where it is already, but only in memory
    assert CheckpointStore(folder / "checkpoints").steps() == [7, 4]
    assert not list(memory.iterdir())
    assert train(folder) == digest["indexed"]
    assert not audit_samples(folder).faults


def test_no_snapshot_is_taken_of_a_step_that_is_on_disk(tmp_path: Path, memory: Path) -> None:
    die(tmp_path / "run", 8, checkpoints=CheckpointPolicy(5))
    assert CheckpointStore(own(memory)).steps() == [4], (
        "a request may come two steps late, and then the disk has just been told"
    )


def test_the_cost_is_counted_and_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[float] = []
    monkeypatch.setattr(memory_snapshots.Cadence, "count", lambda _self, cost_s, _began_at: counted.append(cost_s))
    die(tmp_path / "run", 8)
    events = [event for event in read_jsonl(tmp_path / "run" / "ranks" / "0.jsonl") if event.get("in_memory")]
    assert [event["step"] for event in events] == [2, 3]
    for event in events:
        assert event["stall_s"] > 0
        assert event["write_s"] > 0
        assert counted.pop(0) == pytest.approx(event["stall_s"] + event["write_s"], abs=2e-4)
        assert event["num_bytes"] > 2 * 15 * 4, "weights and momentum"


def test_a_later_loop_of_the_same_script_is_resumed(tmp_path: Path, memory: Path) -> None:
    def script(folder: Path, die_in: int | None = None) -> str:
        run = Run(folder, World(), seed=1, sinks=[])
        model = run.prepare(nn.Linear(4, 3))
        optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
        try:
            for steps, batch in ((5, 16), (6, 8)):
                for step in run.steps(run.loader(INDEXED, batch, lanes=4), steps=steps):
                    for thread in threading.enumerate():
                        if thread.name == "lockstep-save":
                            thread.join()
                    if step.number == die_in:
                        raise Death
                    step.accumulate(loss, model)
                    step.update(optimizer)
        except Death:
            run.close(abandon=True)
        return run.digest()

    undisturbed = script(tmp_path / "undisturbed")
    script(tmp_path / "run", die_in=10)
    assert CheckpointStore(own(memory)).steps() == [9]
    assert script(tmp_path / "run") == undisturbed
    assert not list(memory.iterdir())
    assert not audit_samples(tmp_path / "run").faults


def test_consumed_samples_are_returned_as_they_were_at_the_time() -> None:
    consumption = ConsumedSamples()
    loader = LaneLoader(INDEXED, 16, World(), lanes=4)
    batches = loader.batches(0)
    consumption.add(loader, next(batches))
    then = consumption.since_last_commit()
    again = ConsumedSamples()
    again.restore(then)
    consumption.add(loader, next(batches))
    again.add(loader, next(loader.batches(1)))
    assert [span["batches"] for span in then] == [[0, 1]]
    assert [span["batches"] for span in consumption.since_last_commit()] == [[0, 2]]
    assert [span["batches"] for span in again.begin_commit()] == [[0, 1], [1, 2]]


def test_any_run_removes_the_snapshots_of_a_deleted_run(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    die(tmp_path / "run", 8)
    place = own(memory)
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS")
    train(tmp_path / "other")
    assert place.is_dir()
    shutil.rmtree(tmp_path / "run")
    train(tmp_path / "one more")
    assert not place.exists()


def test_a_process_without_an_agent_uses_it_and_makes_none(
    tmp_path: Path, memory: Path, digest: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    die(folder, 8)
    name = own(memory).name
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS")
    die(folder, 11, checkpoints=CheckpointPolicy(100))
    assert CheckpointStore(own(memory)).steps() == [7], "it stays until the disk has more"
    assert train(folder) == digest["indexed"]
    assert resumed(folder) == [None, f"{name}/step-7", f"{name}/step-7"]
    assert not list(memory.iterdir())
    assert not audit_samples(folder).faults


@pytest.mark.parametrize("why", ["no agent restarts", "not wanted", "no memory"])
def test_no_snapshot_is_taken_where_none_helps(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "no agent restarts":
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    if why == "no memory":
        monkeypatch.setenv("LOCKSTEP_MEMORY", str(tmp_path / "nowhere"))
    die(tmp_path / "run", 8, checkpoints=CheckpointPolicy(memory=why != "not wanted"))
    assert not list(memory.rglob("step-*"))
    assert not incident_texts(tmp_path / "run")


def test_a_damaged_one_is_named_and_the_disk_is_used(tmp_path: Path, memory: Path, digest: dict[str, str]) -> None:
    folder = tmp_path / "run"
    die(folder, 8)
    path = own(memory) / "step-7" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert train(folder) == digest["indexed"]
    assert resumed(folder) == [None, "checkpoints/step-4"]
    assert incident_texts(folder) == [
        f"{path.parent}: model.safetensors does not match its hash; this snapshot is not used"
    ]
    assert not audit_samples(folder).faults


def test_a_snapshot_that_does_not_continue_the_newest_checkpoint_is_not_used(
    tmp_path: Path, memory: Path, digest: dict[str, str]
) -> None:
    folder = tmp_path / "run"
    die(folder, 4, checkpoints=CheckpointPolicy())
    kept = tmp_path / "kept"
    shutil.copytree(own(memory), kept)
    die(folder, 6, checkpoints=CheckpointPolicy(5))
    for step, parent in (
        (3, "an earlier step"),
        (8, "no parent"),
    ):  # without a parent: as if the commits belonged to another run
        shutil.rmtree(own(memory))
        shutil.copytree(kept, own_path := memory / f"lockstep-{os.geteuid()}-{run_id(folder)}")
        own_path.chmod(0o700)
        if step == 8:
            forge_step(own_path / "step-3", own_path / "step-8")
        die(folder, 6, checkpoints=CheckpointPolicy(5))
        assert resumed(folder)[-1] == "checkpoints/step-5", parent
        assert not (own_path / f"step-{step}").exists(), "it would be in the way of later ones"
    assert train(folder) == digest["indexed"]
    assert not audit_samples(folder).faults


def run_id(folder: Path) -> str:
    return str(RunFolder(folder).read_run_json()["run_id"])


def forge_step(source: Path, target: Path) -> None:
    manifest = read_manifest(source)
    source.rename(target)
    (target / "manifest.json").write_bytes(replace(manifest, step=int(target.name.removeprefix("step-"))).text())


def test_a_snapshot_outlives_the_damage_of_the_checkpoint_it_grew_from(
    tmp_path: Path, memory: Path, digest: dict[str, str]
) -> None:
    folder = tmp_path / "run"
    die(folder, 8)
    (folder / "checkpoints" / "step-4" / "model.safetensors").write_bytes(b"")
    assert train(folder) == digest["indexed"]
    assert resumed(folder)[-1] == f"lockstep-{os.geteuid()}-{run_id(folder)}/step-7"
    assert not audit_samples(folder).faults


def test_a_failed_save_to_disk_loses_no_snapshot(tmp_path: Path, memory: Path, digest: dict[str, str]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    die(folder, 1)
    (folder / "checkpoints").write_text("in the way of all saves")
    die(folder, 8)
    assert len(incident_texts(folder)) == 1
    (folder / "checkpoints").unlink()
    die(folder, 8)
    assert train(folder) == digest["indexed"]
    assert resumed(folder)[-1] == f"lockstep-{os.geteuid()}-{run_id(folder)}/step-7"
    assert not audit_samples(folder).faults


@pytest.mark.parametrize("what", ["a link", "open to others", "a file"])
def test_only_a_private_folder_is_used(tmp_path: Path, memory: Path, digest: dict[str, str], what: str) -> None:
    folder = tmp_path / "run"
    die(folder, 1)
    place = own(memory)
    shutil.rmtree(place)
    if what == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "elsewhere")
    elif what == "open to others":
        place.mkdir(mode=0o755)
    else:
        place.touch()
    assert train(folder) == digest["indexed"]
    (text,) = incident_texts(folder)
    assert text == (
        "no snapshots in memory; after a kill, the run continues from the last checkpoint on the disk: "
        f"{place} is not a folder that only you can access: remove it"
    )
    assert not list(place.iterdir()) if place.is_dir() else place.exists()


def test_too_little_memory_is_reported_with_the_sizes(tmp_path: Path, memory: Path, digest: dict[str, str]) -> None:
    folder = tmp_path / "run"
    with mounted(memory, "-t", "tmpfs", "-o", "size=1m", "none"):
        fill(memory, left_bytes=100_000)  # enough for this one, but not for others as well
        die(folder, 4)
        assert not list(memory.rglob("step-*"))
        (text,) = incident_texts(folder)
        assert re.fullmatch(
            "no snapshots in memory; after a kill, the run continues from the last checkpoint on the disk: "
            ".* has 0.1 MB free, of which 0.1 MB must stay free, and 0.0 MB is needed for 2 of 0.0 MB",
            text,
        )
        assert train(folder) == digest["indexed"]


def test_a_full_memory_costs_no_more_than_the_snapshots(
    tmp_path: Path, memory: Path, digest: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory fills up between the check and the write."""
    monkeypatch.setattr(memory_snapshots, "why_no_room", lambda *_: None)
    folder = tmp_path / "run"
    with mounted(memory, "-t", "tmpfs", "-o", "size=1m", "none"):
        acts = {6: lambda: fill(memory), 9: lambda: (memory / "ballast").unlink()}
        die(folder, 8, checkpoints=CheckpointPolicy(), acts=acts)
        assert CheckpointStore(own(memory, besides="ballast")).steps() == [5], "the one before is still there"
        (text,) = incident_texts(folder)
        assert "No space left on device" in text
        assert train(folder, acts=acts, checkpoints=CheckpointPolicy()) == digest["indexed"]
        assert resumed(folder)[-1] == f"lockstep-{os.geteuid()}-{run_id(folder)}/step-5"
        assert not list(memory.iterdir())
    assert not audit_samples(folder).faults


def test_snapshots_cost_at_most_their_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    now, spent = 1000.0, 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    draw = random.Random(0)
    cadence = memory_snapshots.Cadence()
    began, num_taken = now, 0
    for _ in range(20_000):
        now += draw.uniform(0.0, 0.3)  # a step
        if cadence.is_due():
            cost = draw.choice([0.001, 0.01, 0.1])
            num_taken += 1
            cadence.count(cost, now)
            assert spent <= 0.02 * (now - began), "without the one that is only beginning"
            spent += cost
    assert num_taken > 500
