"""Saving while training goes on. [Note: a save]

save()      on every rank: copy what this rank is to write, and go on
a thread    each rank makes its late copies, writes its files into one draft → all tell how it went
            → rank 0 commits, or clears the draft away → all learn the outcome

Each file has one owner, so that ranks share the work; what is sharded is written by the rank that has it. There is at
most one save under way, so at most one copy. The ranks speak through a group of their own: training does not wait.
"""

import atexit
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from lockstep.checkpoint import disk
from lockstep.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    Piece,
    ShardedTensor,
    StoredFile,
    check_part_name,
)
from lockstep.checkpoint.staging import ChangedWhileCopied, Staging
from lockstep.checkpoint.store import Retention, Store, write_tensors, write_tensors_to_memory
from lockstep.world.objects import all_gather_object, broadcast_object
from lockstep.world.plain_values import Split, split
from lockstep.world.world import World

_CLEAR = (CheckpointError, SafetensorError, ChangedWhileCopied)  # what they say can be shown as it is
_LAST_WAIT_S = 10.0  # of a process that ends by an error, for a save under way


class Content(NamedTuple):
    """What is to be saved: the same on every rank, but for the shards in it."""

    step: int
    parts: Mapping[str, Any]  # by name; any plain value
    facts: Mapping[str, Any]  # what the manifest is to say besides
    is_best: bool = False
    late: Collection[str] = ()  # parts that may be copied late: see the note there


class Outcome(NamedTuple):
    """How a save went, as all ranks see it."""

    step: int
    commit: str | None  # None: it failed
    problem: str | None  # also beside a commit, where something after it went wrong
    num_bytes: int
    write_s: float


class _Written(NamedTuple):
    """What one rank has to say of its files."""

    files: dict[str, StoredFile]
    problem: str | None


class Saver:
    """`run_id`: that every checkpoint names. `attempt` keeps the drafts of a killed process apart from ours."""

    def __init__(self, folder: Path, world: World, run_id: str, attempt: int, beside: "Saver | None" = None) -> None:
        """`beside`: another, for a folder on the disk. This one is for memory, and the two never save at a time: so
        they share the room for copies, and the group, which is the other's to close."""
        self.store = Store(folder)
        self._world = world
        self._run_id = run_id
        self._attempt = attempt
        self._num_saves = 0
        self._is_for_disk = beside is None
        self._staging: Staging = Staging() if beside is None else beside._staging
        self._under_way: Future[Outcome] | None = None
        self._thread: threading.Thread | None = None
        self._group: dist.ProcessGroup | None = _own_group(world) if beside is None else beside._group
        # Only ranks that see the same folder as rank 0, on the same disk: another machine may have one of its own.
        places = all_gather_object([world.node, *_identity(folder.parent)])
        self._writers = [rank for rank, place in enumerate(places) if place == places[0]]

    def save(
        self, content: Content, retention: Retention, after_commit: Callable[[Manifest], None] | None = None
    ) -> None:
        """Begin to save; the one before must have been waited for. `after_commit`: for rank 0, called by the thread."""
        assert self._under_way is None, "wait() comes before save()"
        for part in content.parts:
            check_part_name(part)
        splits = {part: split(value, part) for part, value in content.parts.items()}
        own = self._own_files(splits)
        late = {name: tensors for name, tensors in own.items() if _part(name) in content.late}
        self._staging.begin({name: tensors for name, tensors in own.items() if name not in late}, late)
        self._num_saves += 1
        draft = self.store.draft(content.step, f"{self._attempt}-{self._num_saves}")
        future: Future[Outcome] = Future()
        self._under_way = future

        def work() -> None:
            try:
                future.set_result(self._save(content, splits, draft, retention, after_commit))
            except BaseException as error:  # the other ranks cannot be asked any more
                future.set_result(Outcome(content.step, None, f"{type(error).__name__}: {error}", 0, 0.0))

        # A daemon: a rank that fails must be able to leave, even while this waits for one that will never answer.
        self._thread = threading.Thread(target=work, name="lockstep-save", daemon=True)
        self._thread.start()
        # But if it can come to its end it should: torch aborts a process that ends while a thread is in it.
        atexit.register(self._thread.join, _LAST_WAIT_S)

    @property
    def is_busy(self) -> bool:
        """Is a save under way? Ranks come to know its end at different times."""
        return self._under_way is not None and not self._under_way.done()

    def wait_for_copies(self) -> None:
        """Before an update: until nothing that it changes is still to be copied."""
        self._staging.wait()

    def news(self) -> Outcome | None:
        """The outcome of the save under way, once, if it has come to its end."""
        return self.wait() if self._under_way is not None and self._under_way.done() else None

    def wait(self) -> Outcome | None:
        """Wait for the save under way, if there is one."""
        future, self._under_way = self._under_way, None
        if future is None or self._thread is None:
            return None
        outcome = future.result()
        self._thread.join()  # it still lets go of tensors; in a process that ends meanwhile, that aborts it
        atexit.unregister(self._thread.join)
        return outcome

    def close(self, *, abandon: bool = False) -> None:
        """`abandon`: wait for nobody; a save under way is then committed or not, as it happens."""
        if abandon:
            return
        self.wait()
        if self._is_for_disk and self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
            self._group = None

    def _own_files(self, splits: Mapping[str, Split]) -> dict[str, dict[str, Tensor]]:
        owners = _share_out({part: _num_bytes(each.tensors) for part, each in splits.items()}, self._writers)
        rank = self._world.rank
        whole = {_file(part): each.tensors for part, each in splits.items() if each.tensors and owners[part] == rank}
        shards = {
            _file(part, rank): {name: shard.local for name, shard in each.shards.items()}
            for part, each in splits.items()
            if each.shards
        }
        return whole | shards

    def _save(
        self,
        content: Content,
        splits: Mapping[str, Split],
        draft: Path,
        retention: Retention,
        after_commit: Callable[[Manifest], None] | None,
    ) -> Outcome:
        started = time.perf_counter()
        written = self._write(draft)
        offsets = {part: {name: shard.offsets for name, shard in s.shards.items()} for part, s in splits.items()}
        reports = all_gather_object({**written._asdict(), "offsets": offsets}, group=self._group)
        if len(reports) != self._world.size:
            # This rank is leaving and has taken the group down: what it alone knows of is not a checkpoint.
            raise CheckpointError("the other ranks cannot be asked any more")
        problems = [report["problem"] for report in reports if report["problem"] is not None]
        commit = secrets.token_hex(8)
        stored = {name: StoredFile(*file) for report in reports for name, file in report["files"].items()}
        is_committed = False
        if self._world.is_main:
            try:
                if not problems:
                    manifest = self._manifest(content, splits, stored, reports, commit)
                    self._commit(draft, manifest)
                    is_committed = True
                    problems = self._follow_up(manifest, retention, after_commit)
            except Exception as error:  # whatever it is: the others wait for our word
                problems = [_words(error)]
            disk.remove_folder(draft)  # if it is still there
        num_bytes = sum(file.size for file in stored.values())
        own = Outcome(
            content.step,
            commit if is_committed else None,
            "; ".join(dict.fromkeys(problems)) or None,
            num_bytes,
            time.perf_counter() - started,
        )
        return Outcome(*broadcast_object(list(own), group=self._group))

    def _write(self, draft: Path) -> _Written:
        stored: dict[str, StoredFile] = {}
        try:
            self._staging.finish()
            files = self._staging.copies
            if files or self._world.is_main:
                for folder in (draft.parent, draft):  # not their parents: a run folder that has vanished stays so
                    with suppress(FileExistsError):
                        disk.make_folder(folder)
            write = write_tensors if self._is_for_disk else write_tensors_to_memory
            for name, tensors in files.items():
                stored[name] = write(draft / name, tensors)
        except Exception as error:  # whatever it is: the others wait for our word
            return _Written({}, f"rank {self._world.rank}: {_words(error)}")
        return _Written(stored, None)

    def _manifest(
        self,
        content: Content,
        splits: Mapping[str, Split],
        files: Mapping[str, StoredFile],
        reports: Sequence[Mapping[str, Any]],
        commit: str,
    ) -> Manifest:
        if missing := [part for part, each in splits.items() if each.tensors and _file(part) not in files]:
            raise CheckpointError(f"no rank has written {', '.join(missing)}")
        shards = {
            part: {
                name: ShardedTensor(
                    tuple(shard.shape),
                    tuple(
                        Piece(_file(part, rank), tuple(report["offsets"][part][name]))
                        for rank, report in enumerate(reports)
                    ),
                )
                for name, shard in each.shards.items()
            }
            for part, each in splits.items()
            if each.shards
        }
        return Manifest(
            step=content.step,
            run_id=self._run_id,
            commit=commit,
            is_best=content.is_best or self.store.says_best(content.step),  # saved once more: it still is
            files=files,
            forms={part: each.form for part, each in splits.items()},
            shards=shards,
            facts=content.facts,
        )

    def _commit(self, draft: Path, manifest: Manifest) -> None:
        for name, file in manifest.files.items():
            if not (draft / name).is_file() or (draft / name).stat().st_size != file.size:
                raise CheckpointError(
                    f"{draft / name} is not there as its rank wrote it: do all machines share the run folder's disk?"
                )
        self.store.commit(draft, manifest)

    def _follow_up(
        self, manifest: Manifest, retention: Retention, after_commit: Callable[[Manifest], None] | None
    ) -> list[str]:
        """What comes after a commit and cannot undo it: all that goes wrong. Only if nothing does is there pruning."""
        problems = []
        for act in (self.store.point_at, after_commit):
            try:
                if act is not None:
                    act(manifest)
            except Exception as error:
                problems.append(_words(error))
        if not problems:
            self.store.prune(retention, manifest.step)
        return problems


def _own_group(world: World) -> dist.ProcessGroup | None:
    """Of gloo, whatever the training uses: what is said here lies in main memory."""
    if world.size == 1:
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=world.timeout_s))
    return group


def _identity(folder: Path) -> list[int]:
    """What tells one folder from another of the same name; nothing, where there is none."""
    try:
        found = folder.stat()
    except OSError:
        return []
    return [found.st_dev, found.st_ino]


def _share_out(sizes: Mapping[str, int], writers: Sequence[int]) -> dict[str, int]:
    """An owner for each part: the largest first, always to whom has least. All ranks come to the same answer."""
    loads = dict.fromkeys(writers, 0)
    owners = {}
    for part in sorted(sizes, key=lambda part: (-sizes[part], part)):
        owner = min(loads, key=lambda rank: (loads[rank], rank))
        owners[part] = owner
        loads[owner] += sizes[part]
    return owners


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _file(part: str, rank: int | None = None) -> str:
    return f"{part}.safetensors" if rank is None else f"{part}.rank-{rank}.safetensors"


def _part(file: str) -> str:
    return re.sub(r"(\.rank-\d+)?\.safetensors$", "", file)


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error) if isinstance(error, _CLEAR) else f"{type(error).__name__}: {error}"
