"""Makes ledgers as real runs do, through commits, kills and changes of the number of processes."""

import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from lockstep.checkpoint.checkpoint_store import CheckpointStore
from lockstep.checkpoint.ledger import append_to_ledger
from lockstep.ckpt.sample_audit import SampleAudit, audit_samples
from lockstep.data.lane_loader import LaneLoader
from lockstep.events.jsonl import JsonlWriter, read_jsonl
from lockstep.train.resume.progress import ConsumedSamples, Loader
from lockstep.world.world import World
from tests.checkpoints import save

Line = dict[str, Any]


class History:
    """The history of a run as the ledger sees it: real loaders and real bookkeeping, but no training."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = folder / "ledger.jsonl"
        self.ledger.touch()
        self.attempt = 1
        self.processes = 1
        self.num_batches = 0
        self.saved = [(None, 0, 0)]  # where an attempt can resume: commit, batches, samples seen until then
        self.seen: list[tuple[int, int]] = []  # epoch and sample, in the order of their use
        self._consumption = ConsumedSamples()

    def loaders(self, length: int, batch: int, tail: str = "drop") -> list[LaneLoader]:
        """Create one loader for each rank."""
        lanes = next(lanes for lanes in (4, 2, 1) if batch % lanes == 0)
        size = min(self.processes, lanes)
        worlds = [World(rank=rank, size=size) for rank in range(size)]
        dataset = TensorDataset(torch.arange(length))
        return [LaneLoader(dataset, batch, world, lanes=lanes, tail=tail, seed=7) for world in worlds]  # type: ignore[arg-type]

    def consume(self, loaders: Sequence[Loader], num_batches: int) -> None:
        stop = self.num_batches + num_batches
        for batches in zip(*(loader.batches(self.num_batches, stop) for loader in loaders), strict=True):
            self._consumption.add(loaders[0], batches[0])
            for lane in (lane for batch in batches for lane in batch.lanes if lane.data is not None):
                self.seen += [(batches[0].epoch, int(sample)) for sample in lane.data[0][: lane.size]]
            self.num_batches += 1

    def commit(self, *, checkpoint: bool = False, line: bool = True, **facts: Any) -> str:
        """Commit; with a `checkpoint` that stays, and with a `line` in the ledger, which a kill can prevent."""
        step = self.num_batches
        entry = {
            "parent": self.saved[-1][0],
            "attempt": self.attempt,
            "processes": self.processes,
            "spans": self._consumption.begin_commit(),
        }
        if checkpoint:
            store = CheckpointStore(self.folder / "checkpoints")
            save(store.folder, step, {}, {"ledger": entry, "position": {"batches": self.num_batches}, **facts})
            name = store.manifest(step).commit
            if line:
                append_to_ledger(self.ledger, store.manifest(step))
        else:
            name = secrets.token_hex(8)
            lines = JsonlWriter(self.ledger)
            lines.emit({"commit": name, "step": step, **entry})
            lines.close()
        self._consumption.end_commit(is_committed=True)
        self.saved.append((name, self.num_batches, len(self.seen)))
        return name

    def kill(self, *, back: int = 0, processes: int = 1) -> None:
        """Resume from the newest commit, or from an earlier one if the newest `back` are damaged."""
        del self.saved[max(len(self.saved) - back, 1) :]
        store = CheckpointStore(self.folder / "checkpoints")
        for step in store.steps():
            if store.manifest(step).commit == self.saved[-1][0]:
                append_to_ledger(self.ledger, store.manifest(step))  # as a run does when it resumes
        _, self.num_batches, num_seen = self.saved[-1]
        del self.seen[num_seen:]
        self._consumption = ConsumedSamples()
        self.attempt += 1
        self.processes = processes

    def audit(self) -> SampleAudit:
        return audit_samples(self.folder)

    def lines(self) -> list[Line]:
        return list(read_jsonl(self.ledger))

    def rewrite(self, lines: list[Line]) -> None:
        self.ledger.write_text("".join(json.dumps(line) + "\n" for line in lines))
