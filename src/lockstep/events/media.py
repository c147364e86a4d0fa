"""Logged images and texts: images are PNG files in RUN/media, texts are part of the event."""

import hashlib
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import UserError
from lockstep.events.atomic_files import write_atomic

MEDIA = "media"

_MAX_NAME = 100  # characters: loggers make file names of it
_MAX_TEXT_BYTES = 64 * 1024  # an event is one line, and readers skip lines of a mebibyte

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GREY, _RGB = 0, 2  # PNG's colour types


def check_media_name(name: str) -> None:
    """Refuse a name that an image or a text cannot have."""
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or not name.isprintable():
        raise UserError(
            f"{str(name)[:40]!r} is not a valid name for an image or a text: "
            f"expected 1 to {_MAX_NAME} printable characters"
        )


def check_image(name: str, image: Any) -> None:
    """Refuse what cannot be shown as an image. Cheap, so that every rank can check and all fail together."""
    check_media_name(name)
    if not is_image(image):
        shape = " × ".join(map(str, getattr(image, "shape", ()))) or "no shape"
        raise UserError(
            f"image {name!r}: expected a tensor or an array of uint8, or of floats from 0 to 1, of height × width, "
            f"height × width × 3, 3 × height × width or 1 × height × width; "
            f"got {getattr(image, 'dtype', type(image).__name__)}, {shape}"
        )


def write_image(folder: Path, name: str, step: int, image: Any) -> str:
    """Write RUN/media/NAME-STEP.png atomically and return its path inside the run folder."""
    path = folder / MEDIA / f"{media_file_name(name)}-{step}.png"
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, encode_png(to_pixels(image)))
    return f"{MEDIA}/{path.name}"


def media_file_name(name: str) -> str:
    """A name as part of a file name: it cannot leave the folder, and different names stay different."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", name)
    if plain == name and not name.startswith("."):
        return name
    return f"{plain.lstrip('.')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def truncate_text(text: str) -> str:
    """Text that fits into an event; if it is cut, a last line says so."""
    data = text.encode(errors="replace")
    if len(data) <= _MAX_TEXT_BYTES:
        return data.decode()
    kept = data[:_MAX_TEXT_BYTES].decode(errors="ignore")
    return f"{kept}\n… cut here: the text has {len(data):,} bytes, and an event holds {_MAX_TEXT_BYTES:,}"


def is_image(image: Any) -> bool:
    """Is it a tensor or an array of a dtype and shape that can be shown? Its pixels are not read."""
    shape, dtype = tuple(getattr(image, "shape", ())), str(getattr(image, "dtype", "")).removeprefix("torch.")
    has_pixels = len(shape) == 2 or (len(shape) == 3 and (shape[0] in (1, 3) or shape[2] == 3))
    return has_pixels and 0 not in shape and dtype in ("uint8", "float16", "bfloat16", "float32", "float64")


def to_pixels(image: Any) -> NDArray[np.uint8]:
    """An image, as `is_image` accepts, as bytes of height × width (× 3).

    A shape that could be read both ways, 3 × n × 3, is taken as channels first.
    """
    if hasattr(image, "detach"):  # a tensor on any device; numpy has no bfloat16
        image = image.detach().cpu()
        image = (image.float() if image.is_floating_point() else image).numpy()
    if image.ndim == 3 and image.shape[0] in (1, 3):
        image = image[0] if image.shape[0] == 1 else image.transpose(1, 2, 0)
    if image.dtype != np.uint8:
        image = np.rint(np.clip(np.nan_to_num(image.astype(np.float32), nan=0.0), 0, 1) * 255).astype(np.uint8)
    pixels: NDArray[np.uint8] = image
    return pixels


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """A PNG file of height × width pixels in grey, or height × width × 3 in RGB; needs the standard library only."""
    height, width = pixels.shape[:2]
    rows = np.ascontiguousarray(pixels).reshape(height, -1)
    filters = np.zeros((height, 1), np.uint8)  # every row begins with its filter type: none
    header = struct.pack(">IIBBBBB", width, height, 8, _GREY if pixels.ndim == 2 else _RGB, 0, 0, 0)
    body = zlib.compress(np.hstack([filters, rows]).tobytes())
    return _PNG_SIGNATURE + _png_chunk(b"IHDR", header) + _png_chunk(b"IDAT", body) + _png_chunk(b"IEND", b"")


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
