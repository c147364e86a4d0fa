"""Running real commands from tests: in a clean environment, with a limit, and with nothing left running."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

BIN = Path(sys.executable).parent
LOCKSTEP = [sys.executable, "-m", "lockstep"]
TORCHRUN = [str(BIN / "torchrun"), "--rdzv-endpoint=127.0.0.1:0", "--rdzv-backend=c10d", "--local-addr=127.0.0.1"]


# What a killed agent leaves in shared memory is left here instead, and goes with the session.
_MEMORY = tempfile.TemporaryDirectory(prefix="lockstep-test-memory-")


class Finished(NamedTuple):
    code: int
    out: str
    err: str


def run(command: Sequence[str], cwd: Path, env: dict[str, str] | None = None, timeout_s: float = 90) -> Finished:
    """Run a command to its end."""
    with started(command, cwd, env) as process:
        out, err = process.communicate(timeout=timeout_s)
        return Finished(process.returncode, out, err)


@contextmanager
def started(command: Sequence[str], cwd: Path, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A command that is running; whatever is left of it is killed at the end of the block."""
    process = subprocess.Popen(
        list(command),
        cwd=cwd,
        env=clean_environment() | {"LOCKSTEP_MEMORY": _MEMORY.name} | (env or {}),
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


def clean_environment() -> dict[str, str]:
    """Ours, less anything a launcher may have set."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "TORCHELASTIC_", "LOCKSTEP_", "GLOO_", "NCCL_", "OMP_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def port_is_open(port: int) -> bool:
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
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
