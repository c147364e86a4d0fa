"""Recognizes processes that a rank starts through `torch.multiprocessing`, and that want to make a job of their own.

[Note: nested jobs]

A script that starts its processes itself, by `torch.multiprocessing.spawn` or `Process`, sets a MASTER_PORT for them.
In a rank, they inherit variables that say that an agent hosts the store; so none of them hosts one at that port, and
all wait for it until torch's time limit of half an hour. The functions that such processes call are therefore wrapped,
and joining at a port where nothing can be is an error. Processes that join no job, or this one, work as ever.
"""

import multiprocessing
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlparse

from lockstep import errors
from lockstep.config import environment
from lockstep.errors import LockstepError, UserError, print_error

NESTED_JOB = (
    "this script starts processes for a job of its own inside a rank of another job, where they cannot meet: start it "
    "with `python`, or leave it to `lockstep run -n N` to start the processes"
)

_SPAWN = "torch.multiprocessing.spawn"  # the module; torch.multiprocessing has a function of that name
_JOIN = "torch.distributed.distributed_c10d"
_RAISED_IN_CHILD = re.compile(r"^lockstep\.[\w.]+\.(\w+): (.+)", re.MULTILINE)


def recognize_nested_jobs() -> None:
    """Recognize them from now on, in a rank that has imported torch."""
    spawn, package = sys.modules[_SPAWN], sys.modules["torch.multiprocessing"]
    start_processes = spawn.start_processes

    def start(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return start_processes(SpawnedFunction(fn), *args, **kwargs)

    spawn.start_processes = start  # type: ignore[attr-defined]
    package.start_processes = start  # type: ignore[attr-defined]
    package.Process = SpawnedProcess  # type: ignore[attr-defined]


@dataclass(frozen=True)
class SpawnedFunction:
    """The function that a process calls which a rank has started; at the top level of a module, as pickle needs it."""

    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch.distributed  # noqa: F401

        module = sys.modules[_JOIN]
        rendezvous = module.rendezvous

        def check(url: str, *args: Any, **kwargs: Any) -> Any:
            _check_port(url)
            return rendezvous(url, *args, **kwargs)

        module.rendezvous = check  # type: ignore[attr-defined]
        return self.function(*args, **kwargs)


class SpawnedProcess(multiprocessing.Process):
    """`torch.multiprocessing.Process` in a rank. Torch's own processes, such as data workers, are left alone."""

    def __init__(self, group: None = None, target: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> None:
        is_torchs = str(getattr(target, "__module__", "")).startswith("torch.")
        called = target if target is None or is_torchs else SpawnedFunction(target)
        super().__init__(group, called, *args, **kwargs)

    def run(self) -> None:
        """Call the function, in the new process."""
        try:
            super().run()
        except LockstepError as error:
            sys.exit(print_error(error))


def error_of_child(error: BaseException) -> BaseException:
    """Return the `LockstepError` that a process raised, if that is what `spawn` reports by this error."""
    found = _RAISED_IN_CHILD.search(str(error)) if type(error).__name__ == "ProcessRaisedException" else None
    kind = None if found is None else getattr(errors, found[1], None)
    if found is None or not (isinstance(kind, type) and issubclass(kind, LockstepError)):
        return error
    return kind(found[2])


def _check_port(url: str) -> None:
    """Raise a `UserError` if a process that joins a job by this URL would wait for a store that no process hosts."""
    parts = urlparse(url)
    port = None if parts.port is None else str(parts.port)
    if parts.scheme in ("env", "tcp") and environment.is_port_of_no_store(port):
        raise UserError(NESTED_JOB)
