"""PNG files from pixels, with the standard library alone."""

import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GREY, _RGB = 0, 2  # PNG's names for the kinds of pixels


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """The file of an image: height × width in grey, or height × width × 3 in red, green and blue."""
    height, width = pixels.shape[:2]
    rows = np.ascontiguousarray(pixels).reshape(height, -1)
    filters = np.zeros((height, 1), np.uint8)  # every row begins with its filter: none
    header = struct.pack(">IIBBBBB", width, height, 8, _GREY if pixels.ndim == 2 else _RGB, 0, 0, 0)
    body = zlib.compress(np.hstack([filters, rows]).tobytes())
    return _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def pixels_of(image: Any) -> NDArray[np.uint8]:
    """The bytes to show of what `is_image` says is one. Channels first wins where a shape can be read both ways."""
    if hasattr(image, "detach"):  # a tensor, from any device; numpy knows no bfloat16
        image = image.detach().cpu()
        image = (image.float() if image.is_floating_point() else image).numpy()
    if image.ndim == 3 and image.shape[0] in (1, 3):
        image = image[0] if image.shape[0] == 1 else image.transpose(1, 2, 0)
    if image.dtype != np.uint8:
        image = np.rint(np.clip(np.nan_to_num(image.astype(np.float32), nan=0.0), 0, 1) * 255).astype(np.uint8)
    pixels: NDArray[np.uint8] = image
    return pixels


def is_image(image: Any) -> bool:
    """A tensor or an array of a type and a shape that can be shown? Its pixels are not looked at."""
    shape, kind = tuple(getattr(image, "shape", ())), str(getattr(image, "dtype", "")).removeprefix("torch.")
    has_pixels = len(shape) == 2 or (len(shape) == 3 and (shape[0] in (1, 3) or shape[2] == 3))
    return has_pixels and 0 not in shape and kind in ("uint8", "float16", "bfloat16", "float32", "float64")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
