"""Open regular files only: opening a pipe could block for ever, and a link in a run folder could lead anywhere.

[Note: links] A run folder can hold links that somebody else has made, to files that only this user may read or write.
So lockstep opens nothing in it through a link. Folders are checked once, when the run claims its folder: those that the
user has linked to another disk are followed, links of other users are refused (`RunFolder.claim`).
"""

import errno
import os
import stat
from io import FileIO
from pathlib import Path
from typing import BinaryIO


def open_to_read(path: Path, *, follow_links: bool = False) -> BinaryIO:
    """Open a regular file for reading; anything else is an OSError that says so.

    Args:
        path: the file.
        follow_links: open what a link leads to; for files that the user has named.
    """
    descriptor = _open(path, os.O_RDONLY | (0 if follow_links else os.O_NOFOLLOW))
    return open(descriptor, "rb")  # noqa: PTH123 (a descriptor has no path; the caller closes the file)


def open_to_append(path: Path) -> FileIO:
    """Open a regular file for reading and appending, without a buffer, and create it if there is none."""
    return FileIO(_open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW), "a+")


def open_new(path: Path, mode: int = 0o666) -> BinaryIO:
    """Create a file and open it for writing; an existing file, or a link in its place, is an error."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    return open(descriptor, "wb")  # noqa: PTH123 (a descriptor has no path; the caller closes the file)


def _open(path: Path, flags: int) -> int:
    try:
        # Without O_NONBLOCK, opening a pipe waits for its other end, and no signal ends the wait.
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink() and flags & os.O_NOFOLLOW:
            raise OSError(errno.ELOOP, "a symbolic link, which is not followed here", str(path)) from None
        if error.errno == errno.ENXIO:  # a pipe that nobody reads, or a socket
            raise _not_regular(path) from None
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise _not_regular(path)


def _not_regular(path: Path) -> OSError:
    return OSError(errno.EINVAL, "not a regular file", str(path))
