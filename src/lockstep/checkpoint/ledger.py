"""The ledger, `ledger.jsonl`: which samples each commit has consumed, and the history of commits.

Each line is one commit: its name, its parent commit, and the positions consumed and dropped since the parent. A commit
that a kill undid was never in the ledger. If a kill came between a commit and its line, the checkpoint's manifest has
the same content: `read_lineage` reads both, and follows the parents from the newest commit back to the first. Commits
off that path belong to attempts that were undone. Nothing in a line is trusted before it is checked.
"""

import errno
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.checkpoint import durable_files
from lockstep.checkpoint.checkpoint_store import CheckpointStore
from lockstep.checkpoint.manifest import CheckpointError, Manifest
from lockstep.config.regular_files import open_to_append
from lockstep.events.jsonl import ends_with_newline, read_jsonl

_MAX_LEDGER_BYTES = 2**28
_MAX_NUMBER = 2**60
_MAX_POSITION = 2**31
_MAX_FAULTS = 50
_MAX_CHARACTERS = 60
_COMMIT_NAME = re.compile(r"[0-9a-f]{1,64}")

Line = dict[str, Any]  # {"commit", "parent", "step", "attempt", "processes", "spans"}


class PositionRange(NamedTuple):
    """A range of positions in an epoch's sample order; for a stream, of batch numbers."""

    epoch: int
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.start:,} to {self.stop - 1:,} of epoch {self.epoch + 1:,}"


class Span(NamedTuple):
    """What a commit consumed from one loader."""

    data: Mapping[str, Any]  # describes the loader's data
    batches: range
    consumed: tuple[PositionRange, ...]
    dropped: tuple[PositionRange, ...]


class Commit(NamedTuple):
    """One line of the ledger, checked."""

    name: str
    parent: str | None
    step: int
    attempt: int
    processes: int
    spans: tuple[Span, ...]

    def __str__(self) -> str:
        return f"commit {self.name} (step {self.step:,})"


class Lineage(NamedTuple):
    """The commits that led to a run's newest state."""

    path: list[Commit]  # from the first to the newest
    num_undone: int  # commits that are not on the path


@dataclass
class Faults:
    """What was found wrong, one line each. Only the first 50 are kept: a hostile file must not fill the memory."""

    lines: list[str] = field(default_factory=list)
    num_more: int = 0

    def add(self, line: str) -> None:
        """Keep a line, or only count it."""
        if len(self.lines) < _MAX_FAULTS:
            self.lines.append(line)
        else:
            self.num_more += 1


def ledger_line(manifest: Manifest) -> Line:
    """Return the ledger line of a committed checkpoint, from its manifest."""
    ledger = manifest.facts.get("ledger")
    if not isinstance(ledger, dict) or not isinstance(ledger.get("parent"), str | None):
        raise CheckpointError(f"the manifest of step {manifest.step} does not say which samples it has consumed")
    return {"commit": manifest.commit, "step": manifest.step, **ledger}


def check_ledger_line(manifest: Manifest) -> None:
    """Raise a ValueError, the end of a sentence about the manifest, unless it holds a valid line of the ledger."""
    try:
        _commit(ledger_line(manifest))
    except CheckpointError:
        raise ValueError("does not say which samples it has consumed") from None
    except _InvalidLine as error:
        raise ValueError(str(error)) from None


def append_to_ledger(path: Path, manifest: Manifest, store: CheckpointStore | None = None) -> None:
    """Append a commit's line, unless it is there already, and flush it to disk: its checkpoint will be pruned.

    Args:
        path: the ledger.
        manifest: of the commit.
        store: where to look for parent commits whose lines are missing, after a kill or a full disk. Their lines are
            written first.
    """
    known = {name for line in read_ledger(path) if isinstance(name := line.get("commit"), str)}
    lines: list[Line] = []
    pending: Manifest | None = manifest
    while pending is not None and pending.commit not in known:
        lines.insert(0, ledger_line(pending))
        known.add(pending.commit)
        parent = lines[0].get("parent")
        pending = None if store is None or parent is None or parent in known else store.find(parent)
    if lines:
        _append(path, b"".join(json.dumps(line, allow_nan=False).encode() + b"\n" for line in lines))


def read_ledger(path: Path) -> Iterator[Line]:
    """Yield the lines of a ledger, unchecked; none if there is no file."""
    if path.exists():
        yield from read_jsonl(path)


def read_lineage(ledger: Path, manifests: Iterable[Manifest], faults: Faults) -> Lineage:
    """Find the commits that led to the newest one, from the ledger and from the manifests of the checkpoints.

    Args:
        ledger: the run's ledger.
        manifests: of the run's checkpoints.
        faults: what is wrong with them is added here.
    """
    commits = _read_commits(ledger, faults)
    for manifest in manifests:
        if not isinstance(manifest.facts.get("ledger"), dict):
            continue  # not saved by a run
        place = f"the checkpoint of step {manifest.step:,}"
        line = {"commit": manifest.commit, "step": manifest.step, **manifest.facts["ledger"]}
        commit = _parse(line, place, faults)
        if commit is None:
            continue
        if commits.setdefault(commit.name, commit) != commit:
            faults.add(f"{ledger.name}: its line of {commit} differs from the checkpoint's manifest")
        commits[commit.name] = commit  # trust the manifest: it has a hash, the line has none
    if not commits:
        return Lineage([], 0)
    path = _path_to_newest(commits, faults)
    return Lineage(path, len(commits) - len(path))


def printable_value(value: Any) -> str:
    """Show a value from an untrusted file on one line of bounded length."""
    text = str(value) if isinstance(value, str | int | float) else type(value).__name__
    return ascii(text[:_MAX_CHARACTERS]) if not text.isprintable() else text[:_MAX_CHARACTERS]


def _append(path: Path, data: bytes) -> None:
    with open_to_append(path) as file:
        if file.seek(0, os.SEEK_END) and not ends_with_newline(file):
            data = b"\n" + data  # a kill tore the last line: start a new one
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(file.fileno())
    durable_files.flush(path.parent)


def _read_commits(ledger: Path, faults: Faults) -> dict[str, Commit]:
    commits: dict[str, Commit] = {}
    size = ledger.stat().st_size if ledger.exists() else 0
    if size > _MAX_LEDGER_BYTES:
        faults.add(f"{ledger.name} has {size:,} bytes: at most {_MAX_LEDGER_BYTES:,} are read")
        return commits
    for line in read_ledger(ledger):
        commit = _parse(line, ledger.name, faults)
        if commit is not None and commits.setdefault(commit.name, commit) != commit:
            faults.add(f"{ledger.name}: {commit} appears twice, with different contents")
    return commits


def _path_to_newest(commits: Mapping[str, Commit], faults: Faults) -> list[Commit]:
    """Follow the parents back from the newest commit: in the last attempt, the one that is no commit's parent."""
    parents = {commit.parent for commit in commits.values()}
    ends = [commit for commit in commits.values() if commit.name not in parents]
    if not ends:
        faults.add("the ledger's commits form a cycle: none of them is the newest")
        return []
    commit = max(ends, key=lambda end: (end.attempt, end.step))
    path, names = [commit], {commit.name}
    while commit.parent is not None:
        if commit.parent in names:
            faults.add(f"{commit} has the parent {commit.parent}, which comes after it: the commits form a cycle")
            break
        if commit.parent not in commits:
            faults.add(
                f"{commit} has the parent {commit.parent}, which is neither in the ledger nor a checkpoint: what was "
                "consumed before is not known"
            )
            break
        commit = commits[commit.parent]
        path.append(commit)
        names.add(commit.name)
    path.reverse()
    for earlier, later in pairwise(path):
        if (later.step, later.attempt) < (earlier.step, earlier.attempt) or later.attempt < earlier.attempt:
            faults.add(f"{later} of attempt {later.attempt} has the parent {earlier} of attempt {earlier.attempt}")
    return path


class _InvalidLine(Exception):
    """A line was refused; the message says why, as the end of a sentence about the line."""


def _parse(line: Mapping[str, Any], place: str, faults: Faults) -> Commit | None:
    try:
        return _commit(line)
    except _InvalidLine as error:
        faults.add(f"{place}: the line of commit {printable_value(line.get('commit'))} {error}")
        return None


def _commit(line: Mapping[str, Any]) -> Commit:
    name, parent = line.get("commit"), line.get("parent")
    if not isinstance(name, str) or not _COMMIT_NAME.fullmatch(name):
        raise _InvalidLine("does not name its commit in hex")
    if parent is not None and not (isinstance(parent, str) and _COMMIT_NAME.fullmatch(parent)):
        raise _InvalidLine(f"has the parent {printable_value(parent)}, which is not the name of a commit")
    spans = _list(line, "spans")
    return Commit(
        name=name,
        parent=parent,
        step=_number("step", line.get("step")),
        attempt=_number("attempt", line.get("attempt")),
        processes=_number("processes", line.get("processes"), 1),
        spans=tuple(_span(span) for span in spans),
    )


def _span(span: Any) -> Span:
    if not isinstance(span, dict) or not isinstance(span.get("data"), dict):
        raise _InvalidLine("has a span that does not describe its data")
    batches = _list(span, "batches")
    if len(batches) != 2:
        raise _InvalidLine(f"has {len(batches)} numbers for a span's batches instead of 2")
    start = _number("batches", batches[0])
    stop = _number("batches", batches[1], start + 1)
    max_position = _MAX_POSITION if span["data"].get("kind") == "indexed" else _MAX_NUMBER
    return Span(
        data=span["data"],
        batches=range(start, stop),
        consumed=tuple(_position_range("consumed", found, max_position) for found in _list(span, "consumed")),
        dropped=tuple(_position_range("dropped", found, max_position) for found in _list(span, "dropped")),
    )


def _position_range(name: str, found: Any, max_position: int) -> PositionRange:
    if not isinstance(found, list) or len(found) != 3:
        raise _InvalidLine(f"has something in {name} that is not [epoch, start, stop]")
    start = _number(name, found[1], 0, max_position)
    return PositionRange(_number(name, found[0]), start, _number(name, found[2], start + 1, max_position))


def _list(content: Mapping[str, Any], name: str) -> list[Any]:
    value = content.get(name)
    if not isinstance(value, list):
        raise _InvalidLine(f"has no list of {name}")
    return value


def _number(name: str, value: Any, least: int = 0, most: int = _MAX_NUMBER) -> int:
    if type(value) is not int or not least <= value <= most:
        raise _InvalidLine(
            f"has {printable_value(value)} in {name}: expected a whole number from {least:,} to {most:,}"
        )
    return value
