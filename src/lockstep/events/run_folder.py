"""The run folder: what stands where, and how a run claims it."""

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.draft import read
from lockstep.config.json_text import parse_json
from lockstep.config.resolved import difference, digest, dump
from lockstep.config.schema import Config
from lockstep.errors import UserError
from lockstep.events.jsonl import read_lines

FORMAT_VERSION = 1

_MAX_RUN_JSON_BYTES = 2**20


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
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def rank_log(self, rank: int) -> Path:
        return self.path / "ranks" / f"{rank}.jsonl"

    def claim(self, config: Config, fingerprint: Mapping[str, Any]) -> int:
        """Make the folder ours, or come back to it with the same config; return the number of this attempt.

        Nothing that is there is ever overwritten: another config, or a folder that is not a run's, is refused.
        """
        if self.facts.exists():
            self._check_same(config)
            return 1 + max((event.get("attempt", 0) for event in self._events_so_far()), default=0)
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise UserError(f"{self.path} exists and is not a run folder: choose another with --run")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            _write(self.config, dump(config))
            facts = {
                "format": FORMAT_VERSION,
                "run_id": secrets.token_hex(8),
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "config_digest": digest(config),
                "fingerprint": dict(fingerprint),
            }
            _write(self.facts, json.dumps(facts, indent=1) + "\n")
        except OSError as error:
            raise UserError(f"cannot write the run folder {self.path}: {error.strerror}") from None
        return 1

    def _check_same(self, config: Config) -> None:
        with self.facts.open("rb") as file:
            try:
                facts = parse_json(file.read(_MAX_RUN_JSON_BYTES))
            except ValueError:
                raise UserError(f"{self.facts} is damaged: choose another folder with --run") from None
        if facts.get("format") != FORMAT_VERSION:
            raise UserError(f"{self.facts}: format {facts.get('format')!r}, this lockstep writes {FORMAT_VERSION}")
        if facts.get("config_digest") == digest(config):
            return
        changes = difference(read(self.config).check(type(config)), config)
        raise UserError(
            f"{self.path} holds a run with another config: choose another folder with --run\n"
            + "\n".join(f"  {change}" for change in changes)
        )

    def _events_so_far(self) -> list[dict[str, Any]]:
        return list(read_lines(self.events)) if self.events.exists() else []


def _write(path: Path, text: str) -> None:
    """Whole or not at all: a reader never sees half a file."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text)
    draft.replace(path)
