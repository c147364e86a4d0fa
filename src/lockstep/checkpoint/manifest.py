"""The manifest of a checkpoint: its non-tensor values, and the size and hash of every tensor file.

{"format", "run_id", "commit", "step", "is_best", "files", "forms", "shards", "facts", "sha256"}

The last entry is the hash of all bytes before it. Nothing in a manifest is trusted before it is checked: file names are
plain names, sizes are bounded, and no value can name code to run.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.checkpoint import durable_files
from lockstep.errors import LockstepError

CHECKPOINT_FORMAT_VERSION = 2
MANIFEST = "manifest.json"

_MAX_BYTES = 64 * 2**20
_MAX_FILES = 100_000
_MAX_FILE_BYTES = 2**50
_SEAL = b',\n "sha256": "'
_END = b'"\n}\n'
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\.safetensors")
_PART_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_HEX = re.compile(r"[0-9a-f]{16,64}")


class CheckpointError(LockstepError):
    """A checkpoint is missing, damaged or of another format, or could not be written."""


class StoredFile(NamedTuple):
    """What a tensor file must look like when it is read back."""

    size: int  # bytes
    sha256: str  # of the hashes of its chunks, see `content_hash`


class ShardPiece(NamedTuple):
    """One rank's shard of a tensor: it is in `file`, and begins at `offsets` in the whole tensor."""

    file: str
    offsets: tuple[int, ...]


class ShardedTensor(NamedTuple):
    """A tensor that was saved in pieces, one by each rank."""

    shape: tuple[int, ...]
    pieces: tuple[ShardPiece, ...]

    def as_json(self) -> dict[str, Any]:
        """Return it as the manifest stores it."""
        return {"shape": self.shape, "pieces": [piece._asdict() for piece in self.pieces]}


@dataclass(frozen=True)
class Manifest:
    """Everything in a checkpoint except its tensors."""

    step: int
    run_id: str
    commit: str  # a random name: two saves of the same step differ in it
    is_best: bool  # by the run's metric, among all checkpoints until then
    files: Mapping[str, StoredFile]
    forms: Mapping[str, Any]  # each part's value without its tensors, which are in PART.safetensors
    shards: Mapping[str, Mapping[str, ShardedTensor]] = field(default_factory=dict)  # by part, then tensor name
    facts: Mapping[str, Any] = field(default_factory=dict)  # metadata: position, fingerprint, metrics …

    def text(self) -> bytes:
        """Return the manifest as the bytes of `manifest.json`."""
        content = {
            "format": CHECKPOINT_FORMAT_VERSION,
            "run_id": self.run_id,
            "commit": self.commit,
            "step": self.step,
            "is_best": self.is_best,
            "files": {name: file._asdict() for name, file in self.files.items()},
            "forms": self.forms,
            "shards": {
                part: {name: sharded.as_json() for name, sharded in shards.items()}
                for part, shards in self.shards.items()
            },
            "facts": self.facts,
        }
        body = json.dumps(content, indent=1, allow_nan=False).encode().removesuffix(b"\n}")
        text = body + _SEAL + hashlib.sha256(body).hexdigest().encode() + _END
        if len(text) > _MAX_BYTES:
            raise CheckpointError(
                f"the manifest would have {len(text):,} bytes, over {_MAX_BYTES:,}: save large values as tensors"
            )
        return text


def read_manifest(checkpoint: Path) -> Manifest:
    """Read and check a checkpoint's manifest. Whatever is wrong with it raises a one-line CheckpointError."""
    try:
        data = durable_files.read_start(checkpoint / MANIFEST, _MAX_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{checkpoint}: {MANIFEST} cannot be read: {error.strerror or error}") from None
    try:
        return _parse(data)
    except _InvalidManifest as error:
        raise CheckpointError(f"{checkpoint}: {MANIFEST} {error}") from None


def check_part_name(name: str) -> None:
    """Raise a CheckpointError unless `name` can be the name of a part, and so of a file."""
    if not _PART_NAME.fullmatch(name):
        raise CheckpointError(
            f"{name[:80]!r} cannot name a part of a checkpoint: use at most 64 letters, digits, and _ . -"
        )


def printable_line(error: object) -> str:
    """Make a library's error, or a name from a file, safe to print as part of one line: no control characters."""
    return "".join(char if char.isprintable() else " " for char in str(error)[:200])


class _InvalidManifest(Exception):
    """A manifest was refused; the message says why, as the end of a sentence about the manifest."""


def _require(condition: object, problem: str) -> None:
    if not condition:
        raise _InvalidManifest(problem)


def _parse(data: bytes) -> Manifest:
    _require(len(data) <= _MAX_BYTES, f"is over {_MAX_BYTES:,} bytes")
    try:
        content = json.loads(data, object_pairs_hook=_object)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        raise _InvalidManifest("is damaged: it is not JSON") from None
    _require(isinstance(content, dict), "is damaged: it is not a JSON object")
    version = content.get("format")
    _require(
        version == CHECKPOINT_FORMAT_VERSION,
        f"has format {_describe(version)}; this version of lockstep reads format {CHECKPOINT_FORMAT_VERSION}",
    )
    body, seal, rest = data.rpartition(_SEAL)
    is_intact = seal and rest == hashlib.sha256(body).hexdigest().encode() + _END
    _require(is_intact, "is damaged: it does not match its own hash")
    for name, kind in (("run_id", str), ("commit", str), ("step", int), ("is_best", bool)):
        _require(type(content.get(name)) is kind, f"has no {name}")
    for name in ("files", "forms", "shards", "facts"):
        _require(isinstance(content.get(name), dict), f"has no {name}")
    _require(
        _HEX.fullmatch(content["run_id"]) and _HEX.fullmatch(content["commit"]), "has a run_id or commit not in hex"
    )
    _require(0 <= content["step"] < 2**60, f"has the step {_describe(content['step'])}")
    files = content["files"]
    _require(len(files) <= _MAX_FILES, f"lists {len(files)} files")
    for part in (*content["forms"], *content["shards"]):
        _require(_PART_NAME.fullmatch(part), f"has a part called {part[:80]!r}")
    return Manifest(
        step=content["step"],
        run_id=content["run_id"],
        commit=content["commit"],
        is_best=content["is_best"],
        files={name: _stored_file(name, file) for name, file in files.items()},
        forms=content["forms"],
        shards={part: _sharded_tensors(part, shards, files) for part, shards in content["shards"].items()},
        facts=content["facts"],
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse repeated names in a JSON object: programs differ in which of the values they take."""
    content = dict(pairs)
    _require(len(content) == len(pairs), "has the same name twice in an object")
    return content


def _describe(value: Any) -> str:
    return repr(value)[:40] if isinstance(value, int | float | str | None) else f"a {type(value).__name__}"


def _stored_file(name: str, file: Any) -> StoredFile:
    _require(_FILE_NAME.fullmatch(name), f"lists the file {name[:80]!r}: expected a plain name.safetensors")
    _require(isinstance(file, dict), f"says nothing about {name}")
    size, sha256 = file.get("size"), file.get("sha256")
    _require(type(size) is int and 0 <= size <= _MAX_FILE_BYTES, f"gives {name} the size {_describe(size)}")
    _require(isinstance(sha256, str) and _HEX.fullmatch(sha256), f"gives {name} no hash")
    return StoredFile(size, sha256)


def _sharded_tensors(part: str, shards: Any, files: Mapping[str, Any]) -> dict[str, ShardedTensor]:
    _require(isinstance(shards, dict), f"says nothing about the shards of {part}")
    return {name: _sharded_tensor(f"{part}/{printable_line(name)}", shard, files) for name, shard in shards.items()}


def _sharded_tensor(name: str, shard: Any, files: Mapping[str, Any]) -> ShardedTensor:
    _require(isinstance(shard, dict) and isinstance(shard.get("pieces"), list), f"lacks the pieces of {name}")
    shape = _sizes(name, shard.get("shape"))
    pieces = []
    for piece in shard["pieces"]:
        file = piece.get("file") if isinstance(piece, dict) else None
        _require(isinstance(file, str) and file in files, f"has a piece of {name} in no known file")
        offsets = _sizes(name, piece.get("offsets"))
        # A single offset is a position in the flattened tensor.
        _require(len(offsets) in (1, len(shape)), f"has a piece of {name} of another number of dimensions")
        pieces.append(ShardPiece(piece["file"], offsets))
    return ShardedTensor(shape, tuple(pieces))


def _sizes(name: str, sizes: Any) -> tuple[int, ...]:
    _require(isinstance(sizes, list) and len(sizes) <= 64, f"has no sizes for {name}")
    total = 1
    for size in sizes:
        _require(type(size) is int and 0 <= size <= _MAX_FILE_BYTES, f"has the size {_describe(size)} for {name}")
        total *= max(size, 1)
    _require(total <= _MAX_FILE_BYTES, f"has {_describe(total)} elements for {name}")
    return tuple(sizes)
