"""Crash and hang reports: text for people and JSON for programs, in the run folder's `incidents/`."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.events.whole_files import write_whole


def keep_incident(folder: Path, kind: str, text: str, facts: Mapping[str, Any]) -> Path:
    """Write both; the path of the text. Two of one second get different names."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    names = (f"{stamp}-{kind}{f'-{number}' if number else ''}" for number in range(1000))
    path = next(folder / f"{name}.txt" for name in names if not (folder / f"{name}.txt").exists())
    content = {"kind": kind, "t": time.time(), "text": text, **facts}
    write_whole(path.with_suffix(".json"), json.dumps(content, indent=1, allow_nan=False) + "\n")
    write_whole(path, text.encode(errors="backslashreplace").decode() + "\n")  # a message may be in no encoding
    return path
