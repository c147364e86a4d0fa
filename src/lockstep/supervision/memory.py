"""Did the kernel kill a process for want of memory? It counts such kills, for each control group and in all."""

import re
from pathlib import Path

_MAX_BYTES = 2**16
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class OutOfMemoryKills:
    """Those since this was made, in this process's control group; where that cannot be read, on the whole machine."""

    def __init__(self, counters: list[Path] | None = None) -> None:
        candidates = _counters() if counters is None else counters
        self._path = next((path for path in candidates if _read(path) is not None), None)
        self._before = self._now()

    def any_since(self) -> bool:
        return self._now() > self._before

    def _now(self) -> int:
        return 0 if self._path is None else _read(self._path) or 0


def _counters() -> list[Path]:
    """Where the count may stand, the narrowest first: control groups of version 2, of version 1, the machine's."""
    found = []
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        groups = []
    for _, controllers, path in groups:
        if controllers == "":
            found.append(Path(f"/sys/fs/cgroup{path}/memory.events"))
        elif "memory" in controllers.split(","):
            found.append(Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control"))
    return [*found, Path("/proc/vmstat")]


def _read(path: Path) -> int | None:
    try:
        with path.open() as file:
            match = _COUNT.search(file.read(_MAX_BYTES))
    except (OSError, UnicodeDecodeError):
        return None
    return int(match[1]) if match else None
