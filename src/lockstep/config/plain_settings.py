"""Settings that were given as arguments in a script, as a run folder remembers them: JSON, which is YAML too."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.json_text import parse_json

_MAX_BYTES = 2**20


@dataclass(frozen=True)
class PlainSettings:
    values: Mapping[str, Any]

    def text(self) -> str:
        return json.dumps(self.values, indent=1) + "\n"

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.values, sort_keys=True).encode()).hexdigest()

    def changes_since(self, path: Path) -> list[str]:
        """One line for each setting that differs from those in a file, as in `seed: 1 → 2`."""
        with path.open("rb") as file:
            try:
                before = parse_json(file.read(_MAX_BYTES))
            except ValueError:
                before = None
        if not isinstance(before, dict):
            return ["these settings were not written by a script's own loop"]
        now = json.loads(json.dumps(self.values))
        return [
            f"{name}: {before.get(name, '(absent)')} → {now.get(name, '(absent)')}"
            for name in dict.fromkeys([*before, *now])
            if (name in before, before.get(name)) != (name in now, now.get(name))
        ]
