"""Reading the user's files: regular ones only, and never more than a stated number of bytes."""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from lockstep.errors import UserError

MOST_BYTES = 2**30  # of a training or a test set: every process has both in memory


@contextmanager
def opened(file: Path) -> Iterator[BinaryIO]:
    """The file's bytes, unpacked if its name ends in .gz. What goes wrong while they are read is told in one line."""
    try:
        if not file.is_file():  # a link to one is; a folder, a pipe or a device is not
            is_there = file.exists() or file.is_symlink()
            raise UserError(f"{file}: {'not a regular file' if is_there else 'no such file'}")
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            yield cast(BinaryIO, stream)
    except EOFError:
        raise UserError(f"{file}: the compressed data breaks off: fetch the file again") from None
    except (OSError, ValueError, zlib.error) as error:
        raise UserError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def read_file(file: Path, most: int = MOST_BYTES) -> bytes:
    """The whole file, which must have at most so many bytes."""
    with opened(file) as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise UserError(f"{file}: more than the {most:,} bytes that are allowed for: train on a part of it")
    return data
