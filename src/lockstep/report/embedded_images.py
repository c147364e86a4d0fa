"""Embed a run's PNG images into its page, within limits on their number and size."""

import base64
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lockstep.events.media import MEDIA
from lockstep.observe.jsonl_tail import read_bounded
from lockstep.observe.run_record import RunRecord

_PNG = b"\x89PNG\r\n\x1a\n"
_MAX_BYTES = 2**21
_MAX_TOTAL_BYTES = 2**23
_MAX_SIDE = 8192  # pixels
_MAX_IMAGES = 24


class EmbeddedImage(NamedTuple):
    """An image as a data URI."""

    name: str
    step: int | None
    width: int
    height: int
    uri: str


def embed_images(record: RunRecord) -> list[EmbeddedImage]:
    """Return the newest image of each name that the run logged, and those that a recipe wrote to RUN/pictures."""
    images: list[EmbeddedImage] = []
    total_bytes = 0
    for name, step, path in _candidates(record):
        data = _read_png(path)
        if data is None or total_bytes + len(data) > _MAX_TOTAL_BYTES:
            continue
        total_bytes += len(data)
        width, height = struct.unpack(">II", data[16:24])
        uri = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        images.append(EmbeddedImage(name, step, width, height, uri))
        if len(images) == _MAX_IMAGES:
            break
    return images


def _candidates(record: RunRecord) -> Iterator[tuple[str, int | None, Path]]:
    for name, image in record.images.items():
        # An event may contain any path: only a plain file name inside RUN/media is accepted.
        if re.fullmatch(rf"{MEDIA}/[A-Za-z0-9_-][A-Za-z0-9._-]{{0,250}}\.png", image.path):
            yield name, image.step, record.path / image.path
    for path in sorted((record.path / "pictures").glob("*.png"))[:_MAX_IMAGES]:
        yield path.stem, None, path


def _read_png(path: Path) -> bytes | None:
    if path.parent.is_symlink():
        return None
    data = read_bounded(path, _MAX_BYTES + 1)
    if data is None or len(data) > _MAX_BYTES or len(data) < 24 or not data.startswith(_PNG):
        return None
    width, height = struct.unpack(">II", data[16:24])
    return data if 0 < width <= _MAX_SIDE and 0 < height <= _MAX_SIDE else None
