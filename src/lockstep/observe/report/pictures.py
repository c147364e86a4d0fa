"""A run's images, put into the page itself: whole PNG files out of the run folder, few and not too large."""

import base64
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lockstep.events.media import MEDIA
from lockstep.observe.growing import read_bounded
from lockstep.observe.record import Record

_PNG = b"\x89PNG\r\n\x1a\n"
_MAX_BYTES = 2**21
_MAX_BYTES_IN_ALL = 2**23
_MAX_SIDE = 8192  # pixels
_MOST = 24


class Picture(NamedTuple):
    name: str
    step: int | None
    width: int
    height: int
    uri: str  # data:


def pictures(record: Record) -> list[Picture]:
    """The newest of each name that the run has logged, and what a recipe has left under pictures/."""
    found: list[Picture] = []
    num_bytes = 0
    for name, step, path in _candidates(record):
        data = _png_in(path)
        if data is None or num_bytes + len(data) > _MAX_BYTES_IN_ALL:
            continue
        num_bytes += len(data)
        width, height = struct.unpack(">II", data[16:24])
        uri = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        found.append(Picture(name, step, width, height, uri))
        if len(found) == _MOST:
            break
    return found


def _candidates(record: Record) -> Iterator[tuple[str, int | None, Path]]:
    for name, image in record.images.items():
        # An event may say any path: only a plain name inside RUN/media is looked at.
        if re.fullmatch(rf"{MEDIA}/[A-Za-z0-9_-][A-Za-z0-9._-]{{0,250}}\.png", image.path):
            yield name, image.step, record.path / image.path
    for path in sorted((record.path / "pictures").glob("*.png"))[:_MOST]:
        yield path.stem, None, path


def _png_in(path: Path) -> bytes | None:
    if path.parent.is_symlink():
        return None
    data = read_bounded(path, _MAX_BYTES + 1)
    if data is None or len(data) > _MAX_BYTES or len(data) < 24 or not data.startswith(_PNG):
        return None
    width, height = struct.unpack(">II", data[16:24])
    return data if 0 < width <= _MAX_SIDE and 0 < height <= _MAX_SIDE else None
