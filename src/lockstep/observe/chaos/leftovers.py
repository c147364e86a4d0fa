"""What a launcher has left behind when it has ended: processes, sockets that listen, shared memory."""

from pathlib import Path

from lockstep.observe.chaos.checks import Check
from lockstep.observe.chaos.job import await_none, kill_all
from lockstep.observe.chaos.processes import Marked, open_listeners

_FAREWELL_S = 30.0  # for what a dead launcher has started to be gone: an import may have to end first


class Leftovers:
    """`memory`: the folder that all launchers leave theirs in."""

    def __init__(self, marked: Marked, memory: Path) -> None:
        self._marked = marked
        self._memory = memory
        self._listeners: set[str] = set()  # all that were ever seen
        self._faults: list[str] = []  # since the last check

    def note_listeners(self) -> None:
        """Those of now must be gone in the end."""
        self._listeners |= self._marked.listening()

    def await_processes(self, how: str, farewell_s: float = _FAREWELL_S) -> None:
        """Of a launcher that has ended, `how`: they must go by themselves. Those that do not are told, and killed."""
        left = await_none(self._marked, farewell_s)
        self._faults += [f"{farewell_s:g} s after its launcher {how} there was still {process}" for process in left]
        kill_all(self._marked)

    def look_into_memory(self) -> None:
        """A launcher that ended by itself has left nothing there."""
        self._faults += [f"shared memory: {path.name}" for path in self._memory.iterdir()]

    def check(self) -> Check:
        left = self._listeners & open_listeners()
        ports = [f"{len(left)} of the sockets that listened still do"] if left else []
        faults, self._faults = self._faults, []
        return Check("no process, port or shared memory is left", (*faults, *ports))
