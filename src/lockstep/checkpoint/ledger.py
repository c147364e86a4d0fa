"""The ledger: which samples each committed checkpoint stands for, so that their use can be audited.

Every line is one commit: its name, the commit that it goes on from, and the positions consumed and dropped in between.
What a kill undoes was never in it. A line that a kill kept from being written is found in the checkpoint's manifest.
"""

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.checkpoint import disk
from lockstep.checkpoint.manifest import CheckpointError, Manifest
from lockstep.checkpoint.store import Store
from lockstep.events.jsonl import ends_with_newline, read_lines

Line = dict[str, Any]  # {"commit", "parent", "step", "attempt", "processes", "spans"}


def line_of(manifest: Manifest) -> Line:
    ledger = manifest.facts.get("ledger")
    if not isinstance(ledger, dict) or not isinstance(ledger.get("parent"), str | None):
        raise CheckpointError(f"the manifest of step {manifest.step} does not say which samples it stands for")
    return {"commit": manifest.commit, "step": manifest.step, **ledger}


def write_line(path: Path, manifest: Manifest, store: Store | None = None) -> None:
    """Append a commit's line, unless it is there, and bring it to the disk: its checkpoint is pruned some day.

    Before it come those of the commits that it has grown from, if a full disk kept them out and `store` has them still.
    """
    known = {line.get("commit") for line in read_ledger(path)}
    lines: list[Line] = []
    next_one: Manifest | None = manifest
    while next_one is not None and next_one.commit not in known:
        lines.insert(0, line_of(next_one))
        known.add(next_one.commit)
        parent = lines[0].get("parent")
        next_one = None if store is None or parent is None or parent in known else store.find(parent)
    if lines:
        _append(path, b"".join(json.dumps(line, allow_nan=False).encode() + b"\n" for line in lines))


def _append(path: Path, data: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        if file.tell() and not ends_with_newline(path):
            data = b"\n" + data  # keep ours apart from the torn line
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(file.fileno())
    disk.flush(path.parent)


def read_ledger(path: Path) -> Iterator[Line]:
    if path.exists():
        yield from read_lines(path)
