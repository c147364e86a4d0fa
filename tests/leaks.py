"""The guard around every test: it fails a test that leaves something behind, names what was left, and removes it.

A pytest plugin: conftest.py imports its fixtures and hooks for this suite; `-p tests.leaks` loads them in any other.

When pytest-xdist runs tests side by side, a new file in shared memory may come from any of them, so shared memory is
checked once, when all tests are over.
"""

import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from lockstep.testing import close_pool, pool_pids
from tests.warm_python import close_warm_python, warm_pids

SHARED_MEMORY = Path("/dev/shm")

# What ends by itself may take a moment to: threads, processes, the files they hold.
GRACE_S = 1.0
_POLL_S = 0.02

_SHARED_BEFORE = pytest.StashKey[frozenset[str]]()

_TOOLS_FOLDERS = frozenset(
    {".git", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".venv", "__pycache__"}
)

# pytest names the test; torch and scikit-learn set these for their own libraries when first used.
_TOOLS_VARIABLES = frozenset(
    {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
)


@dataclass(frozen=True)
class ProcessSnapshot:
    """Everything that a test could leave changed, at one moment."""

    processes: frozenset[int]
    threads: frozenset[threading.Thread]
    environment: dict[str, str]
    working_directory: str
    files: frozenset[str]
    shared_memory: frozenset[str]

    @classmethod
    def now(cls, folders: Iterable[Path], *, is_alone: bool) -> "ProcessSnapshot":
        """`is_alone`: no other worker of the session runs tests at the same time."""
        return cls(
            processes=frozenset(_descendants(os.getpid())),
            threads=frozenset(threading.enumerate()),
            environment={name: value for name, value in os.environ.items() if name not in _TOOLS_VARIABLES},
            working_directory=str(Path("/proc/self/cwd").readlink()),  # unlike getcwd, also when it was deleted
            files=frozenset(path for folder in folders for path in _entries(folder)),
            shared_memory=_shared_memory() if is_alone else frozenset(),
        )


@dataclass(frozen=True)
class Leaks:
    """What differs between two moments, except for what may differ."""

    processes: list[psutil.Process]
    threads: list[threading.Thread]
    variables: list[str]
    working_directory: str | None
    files: list[str]
    shared_memory: list[str]

    @classmethod
    def between(cls, before: ProcessSnapshot, after: ProcessSnapshot) -> "Leaks":
        moved = after.working_directory != before.working_directory
        return cls(
            processes=_leaked(after.processes - before.processes),
            threads=[thread for thread in after.threads - before.threads if not _is_foreign(thread)],
            variables=sorted(
                name
                for name in before.environment.keys() | after.environment.keys()
                if before.environment.get(name) != after.environment.get(name)
            ),
            working_directory=after.working_directory if moved else None,
            files=sorted(after.files - before.files),
            shared_memory=[path for path in after.shared_memory - before.shared_memory if not _is_anothers(path)],
        )

    def described(self) -> list[str]:
        lines = [f"process {process.pid}: {_command(process)}" for process in self.processes]
        lines += [f"thread {thread.name!r}{' (daemon)' * thread.daemon}" for thread in self.threads]
        lines += [f"environment variable {name}" for name in self.variables]
        lines += [f"working directory {self.working_directory}"] if self.working_directory else []
        lines += [f"file {path}" for path in [*self.files, *self.shared_memory]]
        return lines

    @property
    def may_go_away(self) -> bool:
        return bool(self.processes or self.threads or self.shared_memory)

    def clear(self, before: ProcessSnapshot) -> None:
        """Undo what would disturb the next test. Files are kept: they may be the user's."""
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self.processes, timeout=GRACE_S)
        for name in self.variables:
            if name in before.environment:
                os.environ[name] = before.environment[name]
            else:
                del os.environ[name]
        os.chdir(before.working_directory)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    here, root = Path.cwd(), request.config.rootpath
    # Where a test writes that forgot tmp_path, and where lockstep itself writes. No deeper: every test pays for this.
    folders = {here, here / "runs", root, root / "runs"}
    is_alone = not hasattr(request.config, "workerinput")
    before = ProcessSnapshot.now(folders, is_alone=is_alone)
    yield
    deadline = time.monotonic() + GRACE_S
    while True:
        leaks = Leaks.between(before, ProcessSnapshot.now(folders, is_alone=is_alone))
        if not leaks.may_go_away or time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    if lines := leaks.described():
        leaks.clear(before)
        pytest.fail("the test left behind\n  " + "\n  ".join(lines), pytrace=False)


def pytest_sessionstart(session: pytest.Session) -> None:
    if _has_workers(session):
        session.config.stash[_SHARED_BEFORE] = _shared_memory()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not _has_workers(session):
        return
    deadline = time.monotonic() + GRACE_S
    while left := _shared_memory() - session.config.stash[_SHARED_BEFORE]:
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    if leaks := sorted(path for path in left if not _is_anothers(path)):
        sys.stderr.write("\n".join(["", "the tests left behind", *(f"  file {path}" for path in leaks), ""]))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _has_workers(session: pytest.Session) -> bool:
    """Whether this process distributes the tests to workers."""
    return bool(getattr(session.config.option, "tx", None))


@pytest.fixture(scope="session", autouse=True)
def no_worker_outlives_the_session() -> Iterator[None]:
    yield
    close_pool()
    close_warm_python()
    left = _leaked(_descendants(os.getpid()))
    assert not left, f"processes outlive the session: {left}"


def _entries(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [
                entry.path
                for entry in entries
                if entry.name not in _TOOLS_FOLDERS and not entry.name.startswith(".coverage")
            ]
    except FileNotFoundError:
        return []


def _shared_memory() -> frozenset[str]:
    return frozenset(path for path in _entries(SHARED_MEMORY) if not _is_of_a_killed_process(Path(path).name))


def _is_of_a_killed_process(name: str) -> bool:
    """Whether it is a file that other libraries create briefly, and leave if their process is killed just then.

    Torch sends tensors through `torch_PID_…`; glibc's `sem_open` makes `sem.` with six random characters and renames it
    (multiprocessing's semaphores are called `sem.mp-…`, so one of these that stays is still a leak).
    """
    if (sent := re.match(r"torch_(\d+)_", name)) is not None:
        return not psutil.pid_exists(int(sent[1]))
    return re.fullmatch(r"sem\.\w{6}", name) is not None


def _descendants(pid: int) -> list[int]:
    """Return all descendants of a process. psutil would go through all processes of the machine."""
    children: list[int] = []
    with suppress(OSError):  # the process has ended
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            children += map(int, path.read_text().split())
    return [*children, *(each for child in children for each in _descendants(child))]


def _leaked(pids: Iterable[int]) -> list[psutil.Process]:
    kept = {*pool_pids(), *warm_pids()}
    leaks = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            # A zombie runs no more; multiprocessing's tracker lives as long as the process it serves.
            is_over = process.status() == psutil.STATUS_ZOMBIE
            if not is_over and pid not in kept and "multiprocessing.resource_tracker" not in _command(process):
                leaks.append(process)
    return leaks


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return "(ended meanwhile)"


def _is_foreign(thread: threading.Thread) -> bool:
    """Whether the test did not start it: pytest-timeout's timer, or a thread that C++ code started."""
    return thread.name.startswith("pytest_timeout") or isinstance(thread, threading._DummyThread)


def _is_anothers(path: str) -> bool:
    """Whether a process outside this test session, such as a second session, holds the file."""
    ours = {os.getpid(), *_descendants(os.getpid())}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid in ours:
                continue
            held = [region.path for region in process.memory_maps()] + [file.path for file in process.open_files()]
            if any(each == path or each.startswith(f"{path}/") for each in held):
                return True
    return False
