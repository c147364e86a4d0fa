"""Standard output and error of a process that trains: missing ones are replaced, and failing ones end nothing.

A log on a full disk, `… | head` or a closed terminal makes a write fail, in the loop's own `print` as well as in ours.
Such lines are lost, and training goes on; later writes are tried again, since a disk may have room again.
"""

import errno
import io
import os
import select
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_NEVER_FAIL = ("replace", "ignore", "xmlcharrefreplace", "namereplace")  # what to do about other characters
_READER_IS_GONE = (errno.EPIPE, errno.EIO)  # `… | head` has read enough; the terminal has been closed


def open_missing_streams() -> None:
    """Open standard input, output and error on the null device where this process was started without them (`>&-`).

    Their descriptors too: else the next files to be opened would get those numbers, and with them what libraries print.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number, which is this one
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115, PTH123 - open as long as the process


def keep_failing_streams() -> None:
    """From now on, let no write to standard output or error fail. Streams that the script has replaced are left alone.

    Characters that a stream's encoding lacks are written as escapes, unless the stream handles them in its own way.
    """
    open_missing_streams()
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if _is_original(stream, descriptor):
            _make_steady(stream, descriptor)


class _SteadyFile(io.FileIO):
    """A file whose writes wait or are dropped where those of other files would fail."""

    _has_failed = False

    def write(self, data: "ReadableBuffer", /) -> int:
        left = memoryview(data).cast("B")
        size = left.nbytes
        try:
            while left:
                written = super().write(left)
                if written is None:  # another process has made the terminal or the pipe non-blocking
                    select.select([], [self], [])
                else:
                    left = left[written:]
        except OSError as error:
            self._report(error)
        return size

    def _report(self, error: OSError) -> None:
        """If this is standard output, say so once on standard error; what fails there is said nowhere."""
        if self._has_failed or self.fileno() != 1 or error.errno in _READER_IS_GONE:
            return
        self._has_failed = True
        # Not through `sys.stderr`: a thread that holds its lock may be waiting for ours.
        with suppress(OSError):
            os.write(2, f"lockstep: standard output: lines are being lost: {error.strerror}\n".encode())


def _is_original(stream: object, descriptor: int) -> bool:
    """Is this the stream that Python has made for the descriptor, and not yet steady?"""
    if type(stream) is not io.TextIOWrapper:
        return False
    try:
        raw = getattr(stream.buffer, "raw", stream.buffer)  # unbuffered (`python -u`), the buffer is the file itself
        # One that closes its descriptor is the script's, as of `os.fdopen(1, "w")`.
        return type(raw) is io.FileIO and raw.fileno() == descriptor and not raw.closefd
    except ValueError:  # the script has closed or detached it
        return False


def _make_steady(stream: io.TextIOWrapper, descriptor: int) -> None:
    """Let no write to this stream fail. It stays the same object, which loggers and `sys.__stdout__` hold too."""
    raw = _SteadyFile(descriptor, "w", closefd=False)
    raw.name = stream.name
    with suppress(OSError):  # what was printed before may not be written either
        stream.flush()
    io.TextIOWrapper.__init__(
        stream,
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors if stream.errors in _NEVER_FAIL else "backslashreplace",
        newline="\n",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
