"""The run folder: what stands where, and how a run claims it."""

import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TextIO

from lockstep.config.json_text import parse_json
from lockstep.errors import UserError
from lockstep.events.jsonl import read_lines
from lockstep.events.whole_files import flush, write_whole

FORMAT_VERSION = 1

_MAX_RUN_JSON_BYTES = 2**20


class Settings(Protocol):
    """What a run was asked to do, in a form that can be written down and compared."""

    def text(self) -> str:
        """For config.yaml."""
        ...

    def digest(self) -> str: ...

    def changes_since(self, path: Path) -> list[str]:
        """One line for each setting that differs from those in a config.yaml and belongs to the run for life."""
        ...


@dataclass(frozen=True)
class Claim:
    """A run's hold on its folder, until it is released or the process ends."""

    run_id: str
    attempt: int
    lock: TextIO

    def release(self) -> None:
        self.lock.close()


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def facts(self) -> Path:
        return self.path / "run.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def trace(self) -> Path:
        return self.path / "digests.jsonl"

    @property
    def history(self) -> Path:
        return self.path / "history.json"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def evaluations(self) -> Path:
        """Of a search: what each rank has evaluated."""
        return self.path / "evaluations"

    def rank_log(self, rank: int) -> Path:
        return self.path / "ranks" / f"{rank}.jsonl"

    def claim(self, settings: Settings, fingerprint: Mapping[str, Any], *, force: bool = False) -> Claim:
        """Make the folder ours, or come back to it with the same settings.

        Other settings, a folder that is not a run's, or one that another process is training in, is refused. `force`:
        other settings are taken, and written down; those that change no bit are in any case.
        """
        try:
            if self._is_foreign():
                raise UserError(f"{self.path} exists and is not a run folder: choose another with --run")
            self._make()
            lock = self._lock()
            try:
                enter = partial(self._come_back, force=force) if self.facts.exists() else self._begin
                return Claim(enter(settings, fingerprint), self._next_attempt(), lock)
            except BaseException:
                lock.close()
                raise
        except OSError as error:
            raise UserError(f"cannot use the run folder {self.path}: {error.strerror or error}") from None

    def _make(self) -> None:
        """On the disk as well: checkpoints in a folder that a power cut undoes are lost with it."""
        new = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        for path in new:
            flush(path.parent)

    def _is_foreign(self) -> bool:
        if not self.path.exists() or self.facts.exists():
            return False
        # A start that was killed before it wrote run.json leaves its config, its lock and drafts.
        return any(entry != self.config and not entry.name.startswith(".") for entry in self.path.iterdir())

    def _lock(self) -> TextIO:
        """A lock that ends with this process, however it ends, and that no process it forks can keep."""
        lock = (self.path / ".lock").open("a+")
        if sys.platform != "win32":
            import fcntl

            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                owner = lock.read(200).strip()
                lock.close()
                raise UserError(
                    f"{self.path} is in use by {owner}: wait for it, or choose another with --run"
                ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        return lock

    def _begin(self, settings: Settings, fingerprint: Mapping[str, Any]) -> str:
        write_whole(self.config, settings.text(), to_disk=True)
        facts = {
            "format": FORMAT_VERSION,
            "run_id": secrets.token_hex(8),
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "config_digest": settings.digest(),
            "fingerprint": dict(fingerprint),
        }
        write_whole(self.facts, json.dumps(facts, indent=1) + "\n", to_disk=True)
        return str(facts["run_id"])

    def read_facts(self) -> dict[str, Any]:
        """run.json, checked."""
        with self.facts.open("rb") as file:
            try:
                facts = parse_json(file.read(_MAX_RUN_JSON_BYTES))
            except ValueError:
                facts = None
        if not isinstance(facts, dict) or not isinstance(facts.get("run_id"), str):
            raise UserError(f"{self.facts} is damaged: choose another folder with --run")
        if facts.get("format") != FORMAT_VERSION:
            raise UserError(f"{self.facts}: format {facts.get('format')!r}, this lockstep writes {FORMAT_VERSION}")
        return facts

    def _come_back(self, settings: Settings, fingerprint: Mapping[str, Any], *, force: bool) -> str:
        facts = self.read_facts()
        if facts.get("config_digest") != settings.digest():
            changes = settings.changes_since(self.config)
            if changes and not force:
                raise UserError(
                    f"{self.path} holds a run with another config: choose another folder with --run, or go on with "
                    'this one by --force (in a script: resume="force")\n'
                    + "\n".join(f"  {change}" for change in changes)
                )
            changed = {**facts, "config_digest": settings.digest()}
            if changes:  # the run is another one from here on
                changed["fingerprint"] = dict(fingerprint)
            write_whole(self.config, settings.text(), to_disk=True)
            write_whole(self.facts, json.dumps(changed, indent=1) + "\n", to_disk=True)
        return str(facts["run_id"])

    def _next_attempt(self) -> int:
        if not self.events.exists():
            return 1
        attempts = (event.get("attempt") for event in read_lines(self.events))
        return 1 + max((attempt for attempt in attempts if isinstance(attempt, int)), default=0)
