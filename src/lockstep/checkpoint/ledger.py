"""The ledger: which samples each committed checkpoint stands for, so that their use can be audited.

Every line is one commit: its name, the commit that it goes on from, and the positions consumed and dropped in between.
What a kill undoes was never in it. A line that a kill kept from being written is found in the checkpoint's manifest.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.checkpoint import disk
from lockstep.checkpoint.manifest import Manifest
from lockstep.events.jsonl import JsonLines, read_lines

Line = dict[str, Any]  # {"commit", "parent", "step", "attempt", "processes", "spans"}


def line_of(manifest: Manifest) -> Line:
    return {"commit": manifest.commit, "step": manifest.step, **manifest.facts["ledger"]}


def write_line(path: Path, manifest: Manifest) -> None:
    """Append a commit's line, unless it is there; and bring it to the disk before an older checkpoint is removed."""
    if any(line.get("commit") == manifest.commit for line in read_ledger(path)):
        return
    lines = JsonLines(path)
    lines.emit(line_of(manifest))
    lines.close()
    disk.flush(path)
    disk.flush(path.parent)


def read_ledger(path: Path) -> Iterator[Line]:
    if path.exists():
        yield from read_lines(path)
