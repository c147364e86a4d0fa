"""Recognizes processes that a rank starts by `multiprocessing`, and that want to make a job of their own.

[Note: nested jobs]

A script that starts its processes itself, by `torch.multiprocessing.spawn` or as a `Process`, sets a MASTER_PORT for
them. In a rank, they inherit variables that say that an agent hosts the store; so none of them hosts one at that
port, and all wait for it until torch's time limit of half an hour. The functions that such processes call are
therefore wrapped, and joining at a port where nothing can be is an error. Processes that join no job, or this one,
work as ever. Unknown are those that override `Process.run`.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import dropwhile
from multiprocessing.process import BaseProcess
from typing import Any
from urllib.parse import urlparse

from lockstep import errors
from lockstep.config import environment
from lockstep.errors import ConfigError, LockstepError, UserError, print_error

NESTED_JOB = (
    "this script starts processes for a job of its own inside a rank of another job, where they cannot meet: start it "
    "with `python`, or leave it to `lockstep run -n N` to start the processes"
)

_SPAWN = "torch.multiprocessing.spawn"  # the module; torch.multiprocessing has a function of that name
_JOIN = "torch.distributed.distributed_c10d"
_TRACEBACK = "Traceback (most recent call last):\n"
_RAISED_IN_CHILD = re.compile(r"lockstep\.[\w.]+\.(\w+): (.+)", re.DOTALL)
# Whose processes join no job of their own: data workers, pools.
_LIBRARIES = ("torch.", "multiprocessing.", "concurrent.", "lockstep.")


def recognize_nested_jobs() -> None:
    """Recognize them from now on, in a rank that has imported torch."""
    spawn, package = sys.modules[_SPAWN], sys.modules["torch.multiprocessing"]
    start_processes = spawn.start_processes
    initialize = BaseProcess.__init__

    def start(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return start_processes(SpawnedFunction(fn), *args, **kwargs)

    def initialize_process(
        self: BaseProcess, group: None = None, target: Callable[..., Any] | None = None, *args: Any, **kwargs: Any
    ) -> None:
        is_librarys = str(getattr(target, "__module__", "")).startswith(_LIBRARIES)
        initialize(self, group, target if target is None or is_librarys else ProcessTarget(target), *args, **kwargs)

    spawn.start_processes = start  # type: ignore[attr-defined]
    package.start_processes = start  # type: ignore[attr-defined]
    BaseProcess.__init__ = initialize_process  # type: ignore[method-assign]


@dataclass(frozen=True)
class SpawnedFunction:
    """The function that a process calls which a rank has started; at the top level of a module, as pickle needs it."""

    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, in the new process."""
        module = sys.modules.get(_JOIN)  # imported with the function, unless it is one that only imports torch itself
        if module is not None:
            rendezvous = module.rendezvous

            def check(url: str, *args: Any, **kwargs: Any) -> Any:
                _check_port(url)
                return rendezvous(url, *args, **kwargs)

            module.rendezvous = check  # type: ignore[attr-defined]
        return self.function(*args, **kwargs)


class ProcessTarget(SpawnedFunction):
    """The target of a `Process`, whose errors nobody else would show in one line."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the target, in the new process."""
        try:
            return super().__call__(*args, **kwargs)
        except LockstepError as error:
            sys.exit(print_error(error))


def error_of_child(error: BaseException) -> BaseException:
    """Return the `LockstepError` that a process raised, if that is what `spawn` reports by this error."""
    if type(error).__name__ != "ProcessRaisedException":
        return error
    _, _, last = str(error).rpartition(_TRACEBACK)
    raised = "".join(dropwhile(lambda line: line.startswith(" "), last.splitlines(keepends=True)))
    found = _RAISED_IN_CHILD.match(raised)
    kind = None if found is None else getattr(errors, found[1], None)
    if found is None or not (isinstance(kind, type) and issubclass(kind, LockstepError)):
        return error
    message = found[2].strip()
    return ConfigError(message.splitlines()) if kind is ConfigError else kind(message)


def _check_port(url: str) -> None:
    """Raise a `UserError` if a process that joins a job by this URL would wait for a store that no process hosts."""
    parts = urlparse(url)
    port = None if parts.port is None else str(parts.port)
    if parts.scheme in ("env", "tcp") and environment.is_port_of_no_store(port):
        raise UserError(NESTED_JOB)
