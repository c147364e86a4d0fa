"""The run folder: its paths, and how one process at a time claims it, with its settings."""

import hashlib
import json
import os
import secrets
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from lockstep.config.folder_remedies import IN_SCRIPT, FolderRemedies
from lockstep.config.regular_files import open_to_append, open_to_read
from lockstep.errors import UserError
from lockstep.events.atomic_files import flush, write_atomic
from lockstep.events.jsonl import parse_attempt, parse_json, read_jsonl

RUN_FORMAT_VERSION = 1

_MAX_FILE_BYTES = 2**20  # of run.json and config.yaml


class RunSettings(Protocol):
    """What a run was asked to do, in a form that can be saved and compared: a config, or a script's arguments."""

    @property
    def remedies(self) -> FolderRemedies:
        """What messages tell whoever started the run."""
        ...

    def text(self) -> str:
        """The content of config.yaml."""
        ...

    def digest(self) -> str:
        """What identifies the settings in run.json."""
        ...

    def changes_since(self, path: Path) -> list[str]:
        """One line for each setting that differs from the config.yaml at `path` and that a resumed run must keep."""
        ...


@dataclass(frozen=True)
class ScriptSettings:
    """Settings that a script passed as arguments, saved as JSON, which is YAML too. Needs no pydantic and no PyYAML."""

    values: Mapping[str, Any]

    @property
    def remedies(self) -> FolderRemedies:
        """A script has no options of its own."""
        return IN_SCRIPT

    def text(self) -> str:
        """The content of config.yaml."""
        return json.dumps(self.values, indent=1) + "\n"

    def digest(self) -> str:
        """What identifies the settings in run.json."""
        return hashlib.sha256(json.dumps(self.values, sort_keys=True).encode()).hexdigest()

    def changes_since(self, path: Path) -> list[str]:
        """One line for each setting that differs from the file's, as in `seed: 1 → 2`."""
        with open_to_read(path) as file:
            try:
                before = parse_json(file.read(_MAX_FILE_BYTES))
            except ValueError:
                before = None
        if not isinstance(before, dict):
            return [f"{path} was not written by a script"]
        now = json.loads(json.dumps(self.values))
        return [
            f"{name}: {before.get(name, '(absent)')} → {now.get(name, '(absent)')}"
            for name in dict.fromkeys([*before, *now])
            if (name in before, before.get(name)) != (name in now, now.get(name))
        ]


@dataclass(frozen=True)
class Claim:
    """A run's exclusive hold on its folder, until it is released or the process ends."""

    run_id: str
    attempt: int
    lock: FileIO

    def release(self) -> None:
        """Let other processes claim the folder."""
        self.lock.close()


@dataclass(frozen=True)
class RunFolder:
    """The paths inside a run folder, and the way to claim it.

    `is_shared`: claim it even if other users own it or can write to it.
    """

    path: Path
    is_shared: bool = False

    @property
    def config(self) -> Path:
        """The resolved config, or a script's settings."""
        return self.path / "config.yaml"

    @property
    def run_json(self) -> Path:
        """The run's id, creation time, config digest and fingerprint."""
        return self.path / "run.json"

    @property
    def events(self) -> Path:
        """Rank 0's events."""
        return self.path / "events.jsonl"

    @property
    def trace(self) -> Path:
        """Digests of every step, if the run writes a trace."""
        return self.path / "digests.jsonl"

    @property
    def history(self) -> Path:
        """The metrics of every evaluation, in one file."""
        return self.path / "history.json"

    @property
    def ledger(self) -> Path:
        """Which samples each checkpoint had consumed."""
        return self.path / "ledger.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The checkpoints, one folder each."""
        return self.path / "checkpoints"

    @property
    def evaluations(self) -> Path:
        """The designs that each rank of a search has evaluated."""
        return self.path / "evaluations"

    def has_checkpoint(self) -> bool:
        """Is there a committed checkpoint, from which the same command would continue?"""
        return self.run_json.exists() and any(self.checkpoints.glob("step-*"))

    def rank_log(self, rank: int) -> Path:
        """One rank's timing and memory."""
        return self.path / "ranks" / f"{rank}.jsonl"

    def claim(self, settings: RunSettings, fingerprint: Mapping[str, Any], *, force: bool = False) -> Claim:
        """Start a run in the folder, or resume the one in it.

        Raises a UserError if the folder is not a run's, if other users could change it, if another process is using it,
        or if its run has other settings.

        Args:
            settings: what the run was asked to do. Settings that change no bit of the result may differ from before.
            fingerprint: what else the result depends on, saved in run.json.
            force: accept any other settings, and save them.
        """
        try:
            self._check_contents(settings.remedies)
            self._create()
            self._check_access(settings.remedies)
            lock = self._lock(settings.remedies)
            try:
                enter = partial(self._resume, force=force) if self.run_json.exists() else self._start
                return Claim(enter(settings, fingerprint), self._next_attempt(), lock)
            except BaseException:
                lock.close()
                raise
        except OSError as error:
            place = "" if error.filename in (None, str(self.path)) else f"{error.filename}: "
            raise UserError(f"cannot use the run folder {self.path}: {place}{error.strerror or error}") from None

    def _create(self) -> None:
        """Flushed to the disk: if a power cut undid the folder, its checkpoints would be lost with it."""
        new = [path for path in (self.path, *self.path.parents) if not path.exists()]
        # Never writable for every user, even where the umask would allow it.
        self.path.mkdir(mode=0o775, parents=True, exist_ok=True)
        for path in new:
            flush(path.parent)

    def _check_access(self, remedies: FolderRemedies) -> None:
        """Raise a `UserError` if other users could exchange files, or have made links: [Note: links].

        Root, and members of the user's own groups, are trusted.
        """
        if sys.platform == "win32":
            return
        # Asked of a file: some file systems know one owner or one mode only, such as those of Windows, and some NFS.
        with tempfile.TemporaryFile(dir=self.path) as probe:
            own = os.fstat(probe.fileno())
        trusted = {0, own.st_uid}
        owners = {self.path.lstat().st_uid, self.path.stat().st_uid} - trusted  # the path itself can be a link
        problem = None
        if owners:
            problem = f"belongs to another user (uid {owners.pop()})"
        elif not own.st_mode & stat.S_IWOTH:
            problem = _describe_writers(self.path.stat())
        if problem is not None and not self.is_shared:
            raise UserError(
                f"{self.path} {problem}, who could exchange the run's files: {remedies.another_folder}, or pass "
                f"{remedies.shared_folder} if you trust them"
            )
        for entry in self.path.iterdir():
            if entry.is_symlink() and (owner := entry.lstat().st_uid) not in trusted:
                raise UserError(f"{entry} is a link that another user (uid {owner}) made: remove it")

    def _check_contents(self, remedies: FolderRemedies) -> None:
        """Raise a `UserError` if a new run here would overwrite or continue what no run wrote; other files may stay."""
        if not self.path.exists() or self.run_json.exists():
            return
        # A start that was killed before it wrote run.json leaves a lock, drafts and perhaps a config.
        owned = [self.events, self.trace, self.history, self.ledger]
        owned += [self.checkpoints, self.evaluations, self.rank_log(0).parent]
        owned += [] if self._lock_file.exists() else [self.config]
        taken = next((path.name for path in owned if path.exists()), None)
        if taken is not None:
            raise UserError(
                f"{self.path} is not a run folder (it has no run.json), but its {taken} would be taken for the run's: "
                f"{remedies.another_folder}"
            )
        inner = next((entry for entry in self.path.iterdir() if RunFolder(entry).run_json.exists()), None)
        if inner is not None:
            raise UserError(
                f"{self.path} is not a run folder, but holds runs, such as {inner}: {remedies.another_folder}"
            )

    @property
    def _lock_file(self) -> Path:
        return self.path / ".lock"

    def _lock(self, remedies: FolderRemedies) -> FileIO:
        """A lock that ends with this process, however it ends, and that forked processes do not inherit."""
        lock = open_to_append(self._lock_file)
        if sys.platform != "win32":
            import fcntl

            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                owner = lock.read(200).decode(errors="replace").strip()
                lock.close()
                raise UserError(
                    f"{self.path} is in use by {owner}: wait for it to end, or {remedies.another_folder}"
                ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        return lock

    def _start(self, settings: RunSettings, fingerprint: Mapping[str, Any]) -> str:
        write_atomic(self.config, settings.text(), to_disk=True)
        content = {
            "format": RUN_FORMAT_VERSION,
            "run_id": secrets.token_hex(8),
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "config_digest": settings.digest(),
            "fingerprint": dict(fingerprint),
        }
        write_atomic(self.run_json, json.dumps(content, indent=1) + "\n", to_disk=True)
        return str(content["run_id"])

    def read_run_json(self) -> dict[str, Any]:
        """The content of run.json; a UserError if it is damaged or of another format."""
        with open_to_read(self.run_json) as file:
            try:
                content = parse_json(file.read(_MAX_FILE_BYTES))
            except ValueError:
                content = None
        if not isinstance(content, dict) or not isinstance(content.get("run_id"), str):
            raise UserError(f"{self.run_json} is damaged: choose another folder")
        if content.get("format") != RUN_FORMAT_VERSION:
            raise UserError(
                f"{self.run_json}: expected format {RUN_FORMAT_VERSION}, got {content.get('format')!r}: "
                "use the version of lockstep that wrote it"
            )
        return content

    def _resume(self, settings: RunSettings, fingerprint: Mapping[str, Any], *, force: bool) -> str:
        content = self.read_run_json()
        if content.get("config_digest") != settings.digest():
            changes = settings.changes_since(self.config)
            if changes and not force:
                remedies = settings.remedies
                raise UserError(
                    f"{self.path} holds a run with another config: {remedies.another_folder}, or pass {remedies.force} "
                    "to continue it with the new config\n" + "\n".join(f"  {change}" for change in changes)
                )
            changed = {**content, "config_digest": settings.digest()}
            if changes:  # from here on the result depends on these
                changed["fingerprint"] = dict(fingerprint)
            write_atomic(self.config, settings.text(), to_disk=True)
            write_atomic(self.run_json, json.dumps(changed, indent=1) + "\n", to_disk=True)
        return str(content["run_id"])

    def _next_attempt(self) -> int:
        if not self.events.exists():
            return 1
        attempts = (parse_attempt(event.get("attempt")) for event in read_jsonl(self.events))
        return 1 + max((attempt for attempt in attempts if attempt is not None), default=0)


def _describe_writers(folder: os.stat_result) -> str | None:
    """Say who else can write to a folder, by its mode: everybody, or a group that the user is not in."""
    if folder.st_mode & stat.S_IWOTH:
        who = "every user"
    elif folder.st_mode & stat.S_IWGRP and folder.st_gid not in (os.getegid(), *os.getgroups()):
        who = f"another group (gid {folder.st_gid})"
    else:
        return None
    return f"can be written (mode {stat.S_IMODE(folder.st_mode):04o}; `chmod go-w` ends that) by {who}"
