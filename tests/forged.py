"""Checkpoints as somebody who means harm would make them: whatever is in them, their hashes are right."""

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.checkpoint import disk

_SEAL, _END = b',\n "sha256": "', b'"\n}\n'


def forge_manifest(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what the manifest says."""
    content = json.loads((checkpoint / "manifest.json").read_bytes())
    del content["sha256"]
    change(content)
    forge_text(checkpoint, json.dumps(content, indent=1).removesuffix("\n}").encode())


def forge_text(checkpoint: Path, body: bytes) -> None:
    """A manifest of this text, an object less its end."""
    (checkpoint / "manifest.json").write_bytes(body + _SEAL + hashlib.sha256(body).hexdigest().encode() + _END)


def forge_file(checkpoint: Path, name: str, data: bytes) -> None:
    """Put other content into a file, and its hash into the manifest."""
    (checkpoint / name).write_bytes(data)
    stored = {"size": len(data), "sha256": disk.content_hash(checkpoint / name)}
    forge_manifest(checkpoint, lambda content: content["files"].update({name: stored}))


def tensor_file(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data
