"""Run commands from tests: as real processes, of which nothing is left running, or in this process.

Importing torch takes longer than most commands, so Python commands are forks of a process that has imported it (see
`tests/warm_python.py`); `cold=True` asks for a new interpreter, for tests of what happens while Python starts.
Use `call` for errors and help texts, where a process of its own adds nothing.
"""

import io
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import psutil

from lockstep import cli
from lockstep.supervision.stop_signals import STOP_SIGNALS
from tests.warm_python import WarmProcess, has_usual_imports, warm_python

BIN = Path(sys.executable).parent
LOCKSTEP = [sys.executable, "-m", "lockstep"]
TORCHRUN = [str(BIN / "torchrun"), "--rdzv-endpoint=127.0.0.1:0", "--rdzv-backend=c10d", "--local-addr=127.0.0.1"]


@cache
def memory() -> Path:
    """The shared memory of all commands, where killed agents leave theirs; `conftest.py` removes it.

    Its path is short, as sockets need it. It is made on first use: helper processes that only import this leave none.
    """
    return Path(tempfile.mkdtemp(prefix="ls-"))


class Finished(NamedTuple):
    """A command that has ended."""

    code: int
    out: str
    err: str


def run(
    command: Sequence[str], cwd: Path, env: dict[str, str] | None = None, timeout_s: float = 90, *, cold: bool = False
) -> Finished:
    """Run a command to its end."""
    with started(command, cwd, env, cold=cold) as process:
        out, err = process.communicate(timeout=timeout_s)
        return Finished(process.returncode, out, err)


def call(arguments: Sequence[str], cwd: Path, env: dict[str, str] | None = None) -> Finished:
    """Run `lockstep` with these arguments in this process, as `run([*LOCKSTEP, *arguments], …)` would in a new one.

    Working directory, environment, signal handlers and imported modules are as before afterwards. Not for commands that
    train here, which would leave a process group.
    """
    out, err = io.StringIO(), io.StringIO()
    environment = clean_environment() | {"LOCKSTEP_MEMORY": str(memory())} | (env or {})
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    path, modules = list(sys.path), set(sys.modules)
    code = 0
    try:
        with chdir(cwd), patch.dict(os.environ, environment, clear=True), redirect_stdout(out), redirect_stderr(err):
            sys.path.insert(0, str(cwd))
            with patch.object(sys, "argv", ["lockstep", *arguments]):
                cli.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
    finally:
        sys.path[:] = path
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", None)).startswith(f"{cwd}{os.sep}"):
                del sys.modules[name]
    return Finished(code, out.getvalue(), err.getvalue())


def help_of(command: str) -> str:
    """What `lockstep COMMAND --help` prints."""
    finished = call([*command.split(), "--help"], Path.cwd())
    assert (finished.code, finished.err) == (0, "")
    return finished.out


@contextmanager
def started(
    command: Sequence[str], cwd: Path, env: dict[str, str] | None = None, *, cold: bool = False
) -> Iterator["subprocess.Popen[str] | WarmProcess"]:
    """Start a command; whatever is left of it is killed at the end of the block."""
    environment = clean_environment() | {"LOCKSTEP_MEMORY": str(memory())} | (env or {})
    process: subprocess.Popen[str] | WarmProcess
    if not cold and _can_be_warm(command) and has_usual_imports(environment):
        process = warm_python().start(command[1:], cwd, environment)
    else:
        process = subprocess.Popen(
            list(command),
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    try:
        yield process
    finally:
        for left in descendants(process.pid):
            with suppress(psutil.NoSuchProcess):
                left.kill()
        process.kill()
        process.communicate()


def _can_be_warm(command: Sequence[str]) -> bool:
    return command[0] == sys.executable and (list(command[1:3]) == ["-m", "lockstep"] or command[1].endswith(".py"))


def clean_environment() -> dict[str, str]:
    """This process's environment without anything that a launcher may have set."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "TORCHELASTIC_", "LOCKSTEP_", "GLOO_", "NCCL_", "OMP_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def descendants(pid: int) -> list[psutil.Process]:
    """All processes that it has started, and that these have started."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def port_is_open(port: int) -> bool:
    """Whether something listens on it."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Poll until the condition holds; return how long that took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout_s:
            raise AssertionError(f"{what}: not after {timeout_s:g} s")
        time.sleep(0.02)
    return time.monotonic() - began


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
