"""The way that a run has come: its commits from the first to the newest, by the parent that each one names.

A line that a kill kept out of the ledger is in its checkpoint's manifest, and that of a pruned checkpoint is in the
ledger: so both are read. Lines beside the way are of attempts that were undone. Nothing in a line is trusted before it
was checked: a ledger is a file like any other.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.checkpoint.ledger import read_ledger
from lockstep.checkpoint.manifest import Manifest

_MAX_LEDGER_BYTES = 2**28
_MAX_NUMBER = 2**60
_MAX_POSITION = 2**31
_MOST_KEPT = 50
_MOST_CHARACTERS = 60
_NAME = re.compile(r"[0-9a-f]{1,64}")


class Stretch(NamedTuple):
    """Positions of an epoch's order; of a stream, batch numbers."""

    epoch: int
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.start:,} to {self.stop - 1:,} of epoch {self.epoch + 1:,}"


class Span(NamedTuple):
    """What a commit says of one loader."""

    data: Mapping[str, Any]
    batches: range
    consumed: tuple[Stretch, ...]
    dropped: tuple[Stretch, ...]


class Commit(NamedTuple):
    name: str
    parent: str | None
    step: int
    attempt: int
    processes: int
    spans: tuple[Span, ...]

    def __str__(self) -> str:
        return f"commit {self.name} (step {self.step:,})"


class Lineage(NamedTuple):
    path: list[Commit]  # from the first to the newest
    num_undone: int  # commits that are not on it


@dataclass
class Faults:
    """What was found wrong, a line each. A file of nothing but faults must not fill the memory: the rest is counted."""

    lines: list[str] = field(default_factory=list)
    num_more: int = 0

    def add(self, line: str) -> None:
        if len(self.lines) < _MOST_KEPT:
            self.lines.append(line)
        else:
            self.num_more += 1


def read_lineage(ledger: Path, manifests: Iterable[Manifest], faults: Faults) -> Lineage:
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
            faults.add(f"{ledger.name}: its line of {commit} is not what that checkpoint's manifest says")
        commits[commit.name] = commit  # a manifest has a hash, a line has none
    if not commits:
        return Lineage([], 0)
    path = _walk(commits, faults)
    return Lineage(path, len(commits) - len(path))


def shown(value: Any) -> str:
    """Something that a stranger may have written, on one line of bounded length."""
    text = str(value) if isinstance(value, str | int | float) else type(value).__name__
    return ascii(text[:_MOST_CHARACTERS]) if not text.isprintable() else text[:_MOST_CHARACTERS]


def _read_commits(ledger: Path, faults: Faults) -> dict[str, Commit]:
    commits: dict[str, Commit] = {}
    size = ledger.stat().st_size if ledger.exists() else 0
    if size > _MAX_LEDGER_BYTES:
        faults.add(f"{ledger.name} has {size:,} bytes, and no more than {_MAX_LEDGER_BYTES:,} are read")
        return commits
    for line in read_ledger(ledger):
        commit = _parse(line, ledger.name, faults)
        if commit is not None and commits.setdefault(commit.name, commit) != commit:
            faults.add(f"{ledger.name}: {commit} stands there twice, with different contents")
    return commits


def _walk(commits: Mapping[str, Commit], faults: Faults) -> list[Commit]:
    """From the newest back by parents. The newest: of the last attempt, the one that no other goes on from."""
    parents = {commit.parent for commit in commits.values()}
    ends = [commit for commit in commits.values() if commit.name not in parents]
    if not ends:
        faults.add("the ledger's commits go in a circle: none of them is the newest")
        return []
    commit = max(ends, key=lambda end: (end.attempt, end.step))
    path, names = [commit], {commit.name}
    while commit.parent is not None:
        if commit.parent in names:
            faults.add(f"{commit} goes on from {commit.parent}, which comes after it: the commits go in a circle")
            break
        if commit.parent not in commits:
            faults.add(
                f"{commit} goes on from {commit.parent}, which is neither in the ledger nor a checkpoint: what was "
                "consumed before is not known"
            )
            break
        commit = commits[commit.parent]
        path.append(commit)
        names.add(commit.name)
    path.reverse()
    for earlier, later in pairwise(path):
        if (later.step, later.attempt) < (earlier.step, earlier.attempt) or later.attempt < earlier.attempt:
            faults.add(f"{later} of attempt {later.attempt} goes on from {earlier} of attempt {earlier.attempt}")
    return path


class _Bad(Exception):
    """What is wrong with a line."""


def _parse(line: Mapping[str, Any], place: str, faults: Faults) -> Commit | None:
    try:
        return _commit(line)
    except _Bad as error:
        faults.add(f"{place}: the line of commit {shown(line.get('commit'))} {error}")
        return None


def _commit(line: Mapping[str, Any]) -> Commit:
    name, parent = line.get("commit"), line.get("parent")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _Bad("does not name its commit in hex")
    if parent is not None and not (isinstance(parent, str) and _NAME.fullmatch(parent)):
        raise _Bad(f"goes on from {shown(parent)}, which is no commit")
    spans = _list(line, "spans")
    return Commit(
        name,
        parent,
        _number("step", line.get("step")),
        _number("attempt", line.get("attempt")),
        _number("processes", line.get("processes"), 1),
        tuple(_span(span) for span in spans),
    )


def _span(span: Any) -> Span:
    if not isinstance(span, dict) or not isinstance(span.get("data"), dict):
        raise _Bad("has a span that does not say of which data it is")
    batches = _list(span, "batches")
    if len(batches) != 2:
        raise _Bad(f"has {len(batches)} numbers for a span's batches instead of 2")
    start = _number("batches", batches[0])
    stop = _number("batches", batches[1], start + 1)
    indexed = span["data"].get("kind") == "indexed"
    consumed, dropped = (
        tuple(_stretch(name, stretch, _MAX_POSITION if indexed else _MAX_NUMBER) for stretch in _list(span, name))
        for name in ("consumed", "dropped")
    )
    return Span(span["data"], range(start, stop), consumed, dropped)


def _stretch(name: str, stretch: Any, most: int) -> Stretch:
    if not isinstance(stretch, list) or len(stretch) != 3:
        raise _Bad(f"has something in {name} that is not [epoch, first, past the last]")
    start = _number(name, stretch[1], 0, most)
    return Stretch(_number(name, stretch[0]), start, _number(name, stretch[2], start + 1, most))


def _list(thing: Mapping[str, Any], name: str) -> list[Any]:
    value = thing.get(name)
    if not isinstance(value, list):
        raise _Bad(f"has no list of {name}")
    return value


def _number(name: str, value: Any, least: int = 0, most: int = _MAX_NUMBER) -> int:
    if type(value) is not int or not least <= value <= most:
        raise _Bad(f"has {shown(value)} in {name}: expected a whole number from {least:,} to {most:,}")
    return value
