"""A thread of each rank that answers its agent, if it can: [Note: listener].

It sleeps in the read of a named pipe and costs nothing until it is asked. To answer it needs the interpreter lock: a
rank whose stacks can be had but that does not answer is in a native call that holds the lock. It also writes down the
last collectives that torch's flight recorder has, which only the process itself can read.
"""

import _thread
import os
import sys
from contextlib import suppress
from pathlib import Path

from lockstep.supervision import pulse
from lockstep.supervision.rank_files import RankFiles

YOUR_COLLECTIVES = b"c"


def listen(files: RankFiles) -> None:
    """Answer the agent from now on. Not a thread of `threading`: scripts that count their threads need not know."""
    os.mkfifo(files.questions, 0o600)
    # Also for writing: else the pipe would end with the agent's first question.
    pipe = os.open(files.questions, os.O_RDWR | os.O_CLOEXEC)
    _thread.start_new_thread(_answer, (pipe, files.collectives))


def ask(files: RankFiles, question: bytes) -> bool:
    """Put a question. It is answered by two more of `Reading.answers`: at once, and when the collectives are there.

    False, if nobody listens.
    """
    try:
        pipe = os.open(files.questions, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.write(pipe, question) == len(question)
    except OSError:  # full of questions without an answer
        return False
    finally:
        os.close(pipe)


def _answer(pipe: int, collectives: Path) -> None:
    with suppress(OSError):  # the script has closed what it does not know: nobody answers any more
        while questions := os.read(pipe, 64):
            for _ in questions:
                pulse.answer()
                _write_collectives(collectives)
                pulse.answer()


def _write_collectives(path: Path) -> None:
    """Where this torch keeps them: it has a recorder for NCCL and one for all others."""
    recorders = sys.modules.get("torch._C._distributed_c10d")
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(recorders, name, None)
        if dump is not None and b'"entries"' in (text := dump()):
            draft = path.with_suffix(".draft")
            draft.write_bytes(text)
            draft.rename(path)
            return
