"""`ranks(n)`: run a function on n processes and get its results by rank, or an account of what went wrong."""

import pickle
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from lockstep.config import environment
from lockstep.config.placement import LOOPBACK
from lockstep.testing.call import CallInProgress
from lockstep.testing.failures import PortTaken
from lockstep.testing.messages import Call
from lockstep.testing.pool import POOL

if TYPE_CHECKING:  # for the signature only: torch is the workers' business
    from lockstep.world.world import World

P = ParamSpec("P")
T = TypeVar("T")

# The group's own limit lies beyond the call's, so that a hang ends in everybody's stack and not in one rank's error.
_GROUP_TIMEOUT_MARGIN_S = 60.0

# Loopback only; and one thread each, for they share the machine's cores with their caller.
_VARIABLES = {"MASTER_ADDR": LOOPBACK, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Ranks:
    """`size` processes to run a function on; made by `ranks`."""

    size: int
    env: Mapping[str, str]
    timeout_s: float

    def run(self, function: Callable[Concatenate["World", P], T], /, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Call `function(world, *args, **kwargs)` on every rank, in a fresh process group; results in rank order.

        The function is one a module defines by name; arguments and results are copied. It runs in the caller's
        environment (plus `env`) and working directory, with torch's random numbers seeded by its rank. Workers are
        reused, so other process-wide settings that it changes stay changed. Raises `RanksFailed` or `RanksTimeout`.
        """
        try:
            task = pickle.dumps((function, args, kwargs))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"{function!r} cannot be sent to its ranks: {error}; define it at the top level of a module and pass "
                "it values that pickle"
            ) from error
        try:
            values = self._attempt(task)
        except PortTaken:
            # It was free when it was picked, and gone when rank 0 listened on it. Twice in a row is no accident.
            values = self._attempt(task)
        return [pickle.loads(value) for value in values]

    def _attempt(self, task: bytes) -> list[bytes]:
        workers = POOL.first(self.size)
        port = _free_port()
        variables = {**environment.snapshot(), **_VARIABLES, "MASTER_PORT": str(port), **self.env}
        calls = [
            Call(
                rank=rank,
                size=self.size,
                timeout_s=self.timeout_s + _GROUP_TIMEOUT_MARGIN_S,
                task=task,
                environment=variables,
                working_directory=str(Path.cwd()),
                import_path=sys.path,
            )
            for rank in range(self.size)
        ]
        return CallInProgress(workers, self.timeout_s).run(calls)


def ranks(size: int, *, env: Mapping[str, str] | None = None, timeout_s: float = 60.0) -> Ranks:
    """`size` processes on this machine: `ranks(3).run(function, 10)` calls `function(world, 10)` on each.

    `env` adds environment variables to those of the caller; after `timeout_s` the ranks are killed and their stacks
    shown. The processes are started on first use and kept for the next call, whatever its size.
    """
    if size < 1:
        raise ValueError(f"ranks({size}): at least one is needed")
    return Ranks(size, env or {}, timeout_s)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
