"""Save checkpoints in a background thread, on all ranks together, while training continues. [Note: a save]

`save()`     on every rank: copy what this rank is to write, start the thread, return
the thread   finishes the copies → writes this rank's files into the draft folder → exchanges reports with all ranks
             → on rank 0, commits the draft (`CheckpointStore.commit`) or removes it → broadcasts the outcome

Each file has one owner, so the ranks share the work; shards are written by the rank that holds them. At most one save
is in progress, so there is at most one copy. The threads use a process group of their own: training does not wait.
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

from lockstep.checkpoint import durable_files
from lockstep.checkpoint.checkpoint_store import CheckpointStore, Retention
from lockstep.checkpoint.host_copy import ChangedWhileCopiedError, HostCopies
from lockstep.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    ShardedTensor,
    ShardPiece,
    StoredFile,
    check_part_name,
)
from lockstep.checkpoint.tensor_files import write_tensors, write_tensors_to_memory
from lockstep.world.object_collectives import all_gather_object, broadcast_object
from lockstep.world.serialization import SplitValue, split_values
from lockstep.world.world import World

_SELF_EXPLANATORY = (CheckpointError, SafetensorError, ChangedWhileCopiedError)  # shown without the type of the error
EXIT_WAIT_S = 10.0  # how long a failing process waits for the save in progress

AfterCommit = Callable[[Manifest], None]


class SaveContent(NamedTuple):
    """What to save: the same on every rank, except for the shards in it."""

    step: int
    parts: Mapping[str, Any]  # by name: nested plain values and tensors
    facts: Mapping[str, Any]  # metadata for the manifest
    is_best: bool = False
    late: Collection[str] = ()  # parts that may be copied late, see [Note: late copies]


class SaveOutcome(NamedTuple):
    """How a save went; the same on all ranks."""

    step: int
    commit: str | None  # None: it failed
    problem: str | None  # can be set beside a commit, if something went wrong after it
    num_bytes: int
    write_s: float


class _WriteReport(NamedTuple):
    """What one rank reports about the files it has written."""

    files: dict[str, StoredFile]
    problem: str | None


class Saver:
    """Saves a run's checkpoints, one at a time. Every rank creates one and calls the same methods."""

    def __init__(
        self, folder: Path, world: World, run_id: str, attempt: int, disk_saver: "Saver | None" = None
    ) -> None:
        """Create a saver; a collective call.

        Args:
            folder: where the checkpoints go.
            world: the ranks that save together.
            run_id: recorded in every checkpoint.
            attempt: the number of this attempt: keeps its drafts apart from those of an earlier, killed one.
            disk_saver: for a folder in memory: the run's saver for the disk. The two never save at the same time, so
                they share the host memory for copies, and the process group, which the disk saver closes.
        """
        self.store = CheckpointStore(folder)
        self._world = world
        self._run_id = run_id
        self._attempt = attempt
        self._num_saves = 0
        self._is_for_disk = disk_saver is None
        self._copies: HostCopies = HostCopies() if disk_saver is None else disk_saver._copies
        self._outcome: Future[SaveOutcome] | None = None  # of the save in progress
        self._thread: threading.Thread | None = None
        self._group: dist.ProcessGroup | None = _new_group(world) if disk_saver is None else disk_saver._group
        # Whole tensors are written by the ranks that see the same folder on the same disk as rank 0. On another
        # machine the same path can be another disk.
        places = all_gather_object([world.node, *_identity(folder.parent)])
        self._writers = [rank for rank, place in enumerate(places) if place == places[0]]

    def save(self, content: SaveContent, retention: Retention, after_commit: AfterCommit | None = None) -> None:
        """Start to save. The previous save must have been waited for.

        Args:
            content: what to save.
            retention: which checkpoints to keep afterwards.
            after_commit: called on rank 0, in the saving thread, with the manifest that was committed.
        """
        assert self._outcome is None, "wait() comes before save()"
        for part in content.parts:
            check_part_name(part)
        splits = {part: split_values(value, part) for part, value in content.parts.items()}
        own = self._own_files(splits)
        late = {name: tensors for name, tensors in own.items() if _part_name(name) in content.late}
        self._copies.begin({name: tensors for name, tensors in own.items() if name not in late}, late)
        self._num_saves += 1
        draft = self.store.draft(content.step, f"{self._attempt}-{self._num_saves}")
        outcome: Future[SaveOutcome] = Future()
        self._outcome = outcome

        def work() -> None:
            try:
                outcome.set_result(self._save(content, splits, draft, retention, after_commit))
            except BaseException as error:  # the other ranks can no longer be reached
                outcome.set_result(SaveOutcome(content.step, None, f"{type(error).__name__}: {error}", 0, 0.0))

        # A daemon thread: a failing rank must be able to exit even while this waits for a rank that never answers.
        self._thread = threading.Thread(target=work, name="lockstep-save", daemon=True)
        self._thread.start()
        # Still, let it finish if it can: torch aborts a process that exits while one of its threads runs torch code.
        atexit.register(self._thread.join, EXIT_WAIT_S)

    @property
    def is_busy(self) -> bool:
        """Is a save in progress? Ranks can see its end at different times."""
        return self._outcome is not None and not self._outcome.done()

    def wait_for_copies(self) -> None:
        """Wait until everything that an optimizer update changes has been copied; call it before each update."""
        self._copies.wait()

    def poll(self) -> SaveOutcome | None:
        """Return the outcome of the last save if it has finished and was not returned before. Does not wait."""
        return self.wait() if self._outcome is not None and self._outcome.done() else None

    def wait(self) -> SaveOutcome | None:
        """Wait for the save in progress and return its outcome; None if there is none."""
        outcome, self._outcome = self._outcome, None
        if outcome is None or self._thread is None:
            return None
        result = outcome.result()
        self._thread.join()  # it still releases tensors; a process that exits during that is aborted
        atexit.unregister(self._thread.join)
        return result

    def join(self, limit_s: float = EXIT_WAIT_S) -> None:
        """Wait this long for the save in progress, without asking how it went."""
        if self._thread is not None:
            self._thread.join(limit_s)

    def close(self, *, abandon: bool = False) -> None:
        """Wait for the save in progress and close the process group.

        With `abandon=True` it does not wait: the save in progress may or may not be committed.
        """
        if abandon:
            return
        self.wait()
        if self._is_for_disk and self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
            self._group = None

    def _own_files(self, splits: Mapping[str, SplitValue]) -> dict[str, dict[str, Tensor]]:
        """Return the tensors that this rank writes, by file name."""
        owners = _assign_owners({part: _num_bytes(split.tensors) for part, split in splits.items()}, self._writers)
        rank = self._world.rank
        whole = {_file_name(part): s.tensors for part, s in splits.items() if s.tensors and owners[part] == rank}
        shards = {
            _file_name(part, rank): {name: shard.local for name, shard in split.shards.items()}
            for part, split in splits.items()
            if split.shards
        }
        return whole | shards

    def _save(
        self,
        content: SaveContent,
        splits: Mapping[str, SplitValue],
        draft: Path,
        retention: Retention,
        after_commit: AfterCommit | None,
    ) -> SaveOutcome:
        """Write, commit and follow up; in the saving thread of every rank."""
        started = time.perf_counter()
        written = self._write(draft)
        offsets = {part: {name: shard.offsets for name, shard in s.shards.items()} for part, s in splits.items()}
        reports = all_gather_object({**written._asdict(), "offsets": offsets}, group=self._group)
        if len(reports) != self._world.size:
            # This rank is exiting and has destroyed the process group: its own files alone are not a checkpoint.
            raise CheckpointError("the other ranks can no longer be reached")
        problems = [report["problem"] for report in reports if report["problem"] is not None]
        stored = {name: StoredFile(*file) for report in reports for name, file in report["files"].items()}
        commit = None
        if self._world.is_main:
            try:
                if not problems:
                    manifest = self._manifest(content, splits, stored, reports)
                    self._commit(draft, manifest)
                    commit = manifest.commit
                    problems = self._follow_up(manifest, retention, after_commit)
            except Exception as error:  # whatever it is: the other ranks wait for the outcome
                problems = [_describe(error)]
            durable_files.remove_folder(draft)  # if it was not committed
        outcome = SaveOutcome(
            step=content.step,
            commit=commit,
            problem="; ".join(dict.fromkeys(problems)) or None,
            num_bytes=sum(file.size for file in stored.values()),
            write_s=time.perf_counter() - started,
        )
        return SaveOutcome(*broadcast_object(list(outcome), group=self._group))

    def _write(self, draft: Path) -> _WriteReport:
        """Write this rank's files into the draft folder."""
        stored: dict[str, StoredFile] = {}
        try:
            self._copies.finish()
            files = self._copies.files
            if files or self._world.is_main:
                for folder in (draft.parent, draft):  # not their parents: a deleted run folder is not recreated
                    with suppress(FileExistsError):
                        durable_files.make_folder(folder)
            write = write_tensors if self._is_for_disk else write_tensors_to_memory
            for name, tensors in files.items():
                stored[name] = write(draft / name, tensors)
        except Exception as error:  # whatever it is: the other ranks wait for this report
            return _WriteReport({}, f"rank {self._world.rank}: {_describe(error)}")
        return _WriteReport(stored, None)

    def _manifest(
        self,
        content: SaveContent,
        splits: Mapping[str, SplitValue],
        files: Mapping[str, StoredFile],
        reports: Sequence[Mapping[str, Any]],
    ) -> Manifest:
        if missing := [part for part, split in splits.items() if split.tensors and _file_name(part) not in files]:
            raise CheckpointError(f"no rank has written {', '.join(missing)}")
        shards: dict[str, dict[str, ShardedTensor]] = {}
        for part, split in splits.items():
            for name, shard in split.shards.items():
                pieces = (
                    ShardPiece(_file_name(part, rank), tuple(report["offsets"][part][name]))
                    for rank, report in enumerate(reports)
                )
                shards.setdefault(part, {})[name] = ShardedTensor(tuple(shard.shape), tuple(pieces))
        return Manifest(
            step=content.step,
            run_id=self._run_id,
            commit=secrets.token_hex(8),
            is_best=content.is_best or self.store.is_marked_best(content.step),  # a step saved again stays the best
            files=files,
            forms={part: split.form for part, split in splits.items()},
            shards=shards,
            facts=content.facts,
        )

    def _commit(self, draft: Path, manifest: Manifest) -> None:
        """Commit the draft after checking that rank 0 sees the files of all ranks."""
        for name, file in manifest.files.items():
            if not (draft / name).is_file() or (draft / name).stat().st_size != file.size:
                raise CheckpointError(
                    f"{draft / name} is missing or differs from what its rank wrote: "
                    "do all machines share the run folder's disk?"
                )
        self.store.commit(draft, manifest)

    def _follow_up(self, manifest: Manifest, retention: Retention, after_commit: AfterCommit | None) -> list[str]:
        """Do what follows a commit and cannot undo it; return what went wrong. Prune only if nothing did."""
        problems = []
        for action in (self.store.update_pointers, after_commit):
            try:
                if action is not None:
                    action(manifest)
            except Exception as error:
                problems.append(_describe(error))
        if not problems:
            self.store.prune(retention, manifest.step)
        return problems


def _new_group(world: World) -> dist.ProcessGroup | None:
    """Create the saving threads' process group: gloo, because what they exchange is in host memory."""
    if world.size == 1:
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=world.timeout_s))
    return group


def _identity(folder: Path) -> list[int]:
    """Return what distinguishes a folder from another one with the same path; empty if it does not exist."""
    try:
        found = folder.stat()
    except OSError:
        return []
    return [found.st_dev, found.st_ino]


def _assign_owners(sizes: Mapping[str, int], writers: Sequence[int]) -> dict[str, int]:
    """Choose the rank that writes each part: largest part first, to the rank with the least so far.

    All ranks compute the same answer.
    """
    loads = dict.fromkeys(writers, 0)
    owners = {}
    for part in sorted(sizes, key=lambda part: (-sizes[part], part)):
        owner = min(loads, key=lambda rank: (loads[rank], rank))
        owners[part] = owner
        loads[owner] += sizes[part]
    return owners


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _file_name(part: str, rank: int | None = None) -> str:
    return f"{part}.safetensors" if rank is None else f"{part}.rank-{rank}.safetensors"


def _part_name(file: str) -> str:
    return re.sub(r"(\.rank-\d+)?\.safetensors$", "", file)


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error) if isinstance(error, _SELF_EXPLANATORY) else f"{type(error).__name__}: {error}"
