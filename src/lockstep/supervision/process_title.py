"""What `ps` and `top` show of a process: `lockstep: rank 1 of 4, runs/mine`, and not the fork server's command.

Linux shows the command line from the process's own memory, so a title is written over it, and cut to its length. It is
written through a file of /proc, which refuses what a write to a wrong address would turn into a crash. Titles contain
no arguments of the script: these may be secrets. Where /proc does not allow it, nothing happens.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.config.placement import Placement

# How titles begin.
FORK_SERVER = "lockstep: fork server"
CHILD_OF_RANK = "lockstep: child of rank"
_RANK = "lockstep: rank"

_PROCESS = Path("/proc/self")
_ARGUMENTS_BEGIN, _ARGUMENTS_END = 45, 46  # in /proc/PID/stat, counted from the field after the name; see proc(5)


def title_rank(place: Placement, what: str) -> None:
    """Give a rank its title. `what`: its script or, once it has opened one, its run folder."""
    _show(f"{_RANK} {place.rank} of {place.world_size}, {what}", f"rank {place.rank}/{place.world_size}")


def title_forks_of_rank() -> None:
    """Give the forks of this rank, such as its data workers, another title than its own. Call it once."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_title_fork)


def _title_fork() -> None:
    with suppress(OSError):
        title = (_PROCESS / "cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
        if title.startswith(_RANK):
            _show(title.replace(_RANK, CHILD_OF_RANK, 1), "lockstep child")


def title_fork_server(what: str) -> None:
    """Give the fork server its title."""
    _show(f"{FORK_SERVER}, {what}", "lockstep forks")


@contextmanager
def titled_agent(what: str) -> Iterator[None]:
    """Give this process the title of an agent during the block."""
    try:
        before = (_PROCESS / "cmdline").read_bytes(), (_PROCESS / "comm").read_text().rstrip("\n")
    except OSError:
        before = None
    _show(f"lockstep: agent, {what}", "lockstep agent")
    try:
        yield
    finally:
        if before is not None:
            _write(*before)


def describe_target(target: Sequence[str]) -> str:
    """Return the name of the script, module or config that a target names, without further arguments."""
    if list(target[:2]) == ["-m", "lockstep"] and len(target) > 3:
        return f"{target[2]} {Path(target[3]).name}"  # a command of our own: `train digits`
    return target[1] if target[0] == "-m" else Path(target[0]).name


def _show(title: str, name: str) -> None:
    _write(title.encode(errors="replace"), name)


def _write(arguments: bytes, name: str) -> None:
    """Replace the command line, and the name that the kernel itself cuts to 15 characters."""
    with suppress(OSError, ValueError, IndexError):
        fields = (_PROCESS / "stat").read_text(errors="replace").rpartition(")")[2].split()
        begin, end = int(fields[_ARGUMENTS_BEGIN]), int(fields[_ARGUMENTS_END])
        with (_PROCESS / "mem").open("r+b", buffering=0) as memory:
            memory.seek(begin)
            if end > begin and memory.read(end - begin) == (_PROCESS / "cmdline").read_bytes():
                memory.seek(begin)
                # The last byte stays zero: otherwise the kernel would take what follows for a part of the title.
                memory.write(arguments[: end - begin - 1].ljust(end - begin, b"\0"))
        (_PROCESS / "comm").write_text(name)
