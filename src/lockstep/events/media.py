"""Images and text of a run: images as files under RUN/media, text inside the event that carries it."""

import hashlib
import re
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.events.png import encode_png, is_image, pixels_of

MEDIA = "media"

_MAX_NAME = 100  # characters: a logger makes file names of it
_MAX_TEXT_BYTES = 64 * 1024  # an event is one line, and readers pass over lines of a mebibyte


def check_name(name: str) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or not name.isprintable():
        raise UserError(f"{str(name)[:40]!r} is no name for an image or a text: 1 to {_MAX_NAME} printable characters")


def check_image(name: str, image: Any) -> None:
    """Refuse what cannot be shown. Cheap, so that every rank can do it and a mistake is one on all of them."""
    check_name(name)
    if not is_image(image):
        shape = " × ".join(map(str, getattr(image, "shape", ()))) or "no shape"
        raise UserError(
            f"image {name!r}: expected a tensor or an array of uint8, or of floats from 0 to 1, of height × width, "
            f"height × width × 3, 3 × height × width or 1 × height × width; "
            f"got {getattr(image, 'dtype', type(image).__name__)}, {shape}"
        )


def place_image(folder: Path, name: str, step: int, image: Any) -> str:
    """Write RUN/media/NAME-STEP.png, whole or not at all, and return its path inside the run folder."""
    path = folder / MEDIA / f"{file_name(name)}-{step}.png"
    path.parent.mkdir(exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    draft.write_bytes(encode_png(pixels_of(image)))
    draft.replace(path)
    return f"{MEDIA}/{path.name}"


def file_name(name: str) -> str:
    """A name as part of a file's name: it cannot leave the folder, and no two names become one."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", name)
    if plain == name and not name.startswith("."):
        return name
    return f"{plain.lstrip('.')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def bounded(text: str) -> str:
    """Text that fits into an event; what is cut off is said."""
    data = text.encode(errors="replace")
    if len(data) <= _MAX_TEXT_BYTES:
        return data.decode()
    kept = data[:_MAX_TEXT_BYTES].decode(errors="ignore")
    return f"{kept}\n… cut here: {len(data):,} bytes, of which an event holds {_MAX_TEXT_BYTES:,}"
