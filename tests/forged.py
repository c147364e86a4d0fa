"""Forges checkpoints as an attacker would: with any content, and hashes that match it."""

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.checkpoint import durable_files

_SEAL, _END = b',\n "sha256": "', b'"\n}\n'


def forge_manifest(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest's content and update its hash."""
    content = json.loads((checkpoint / "manifest.json").read_bytes())
    del content["sha256"]
    change(content)
    forge_text(checkpoint, json.dumps(content, indent=1).removesuffix("\n}").encode())


def forge_text(checkpoint: Path, body: bytes) -> None:
    """Write a manifest with this text, a JSON object without its closing brace."""
    (checkpoint / "manifest.json").write_bytes(body + _SEAL + hashlib.sha256(body).hexdigest().encode() + _END)


def forge_file(checkpoint: Path, name: str, data: bytes) -> None:
    """Replace a file's content, and its hash in the manifest."""
    (checkpoint / name).write_bytes(data)
    stored = {"size": len(data), "sha256": durable_files.content_hash(checkpoint / name)}
    forge_manifest(checkpoint, lambda content: content["files"].update({name: stored}))


def tensor_file(header: Any, data: bytes = b"") -> bytes:
    """Return the bytes of a safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data
