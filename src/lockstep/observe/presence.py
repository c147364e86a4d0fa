"""Is anybody training in a run folder at this moment? Asked of the system, which knows who holds the folder's lock."""

import os
import re
import struct
import sys
from pathlib import Path
from typing import NamedTuple

from lockstep.observe.growing import opened

_FLOCK = "hhqqi4x"  # Linux's struct flock: type, whence, start, length, process


class Presence(NamedTuple):
    is_here: bool | None  # None: this system does not tell
    who: str  # "process 123 on host"; "" if the file does not say


def presence(folder: Path) -> Presence:
    """For commands, which are processes of their own: inside the training process, closing the file would unlock it."""
    with opened(folder / ".lock") as file:
        if file is None:
            return Presence(False, "")
        owner = re.match(rb"process (\d{1,10}) on ([\w.-]{1,100})", file.read(200))
        who = "" if owner is None else owner[0].decode()
        return Presence(_is_locked(file.fileno()), who)


def _is_locked(descriptor: int) -> bool | None:
    if sys.platform != "linux":
        return None
    import fcntl

    question = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, question)
    except OSError:
        return None
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
