"""Python processes that start with torch imported: forks of one server, for tests that run many commands.

Importing torch takes longer than most commands under test. `WarmPython.start` forks a process that then behaves like
`python ARGS` in the folder and the environment given, with its own standard streams, and exits as Python does. If it
becomes an agent, its fork server is a fork of it too; so are the lockstep commands that it runs as trials.

The server is this file run as a program, one for each pytest process; it ends when that process does.
"""

import atexit
import builtins
import gc
import importlib
import json
import logging
import math
import multiprocessing.process
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import IO, Any, TextIO, cast

import numpy
import torch

from lockstep.command_line import trial_runs
from lockstep.config import environment
from lockstep.launcher import fork_server, rank_processes

_MAX_REQUEST = 1 << 20
_NUM_STREAMS = 2

# Variables that libraries read when they are imported: a process that has others must import them itself.
READ_AT_IMPORT = ("OMP_", "MKL_", "KMP_", "ATEN_", "TORCH_", "CUDA_", "PYTHON", "LD_", "OPENBLAS_")

_finalizers_of_imports: set[Any] = set()

# Which a warm process has replaced.
_start_fork_server = rank_processes.start_fork_server
_start_command = trial_runs.start_command


class WarmProcess:
    """A process forked from the server. It has the part of `subprocess.Popen` that tests use."""

    def __init__(self, server: "WarmPython", pid: int, args: Sequence[str], out: int, err: int) -> None:
        self.args = list(args)
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = os.fdopen(out, encoding="utf-8")
        self.stderr = os.fdopen(err, encoding="utf-8")
        self._server = server
        self._read: dict[TextIO, bytes] = {self.stdout: b"", self.stderr: b""}

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.exit_code(self.pid, timeout_s=0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = self._server.exit_code(self.pid, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All output, up to the end of the last process that has the streams; what was read stays after a timeout."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            for stream in self._read:
                if not stream.closed:
                    selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                left_s = None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0, *self._read.values())
                for key, _ in selector.select(left_s):
                    stream = cast(TextIO, key.fileobj)
                    if data := os.read(key.fd, 1 << 16):
                        self._read[stream] += data
                    else:
                        selector.unregister(stream)
                        stream.close()
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        out, err = (data.decode().replace("\r\n", "\n").replace("\r", "\n") for data in self._read.values())
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class WarmPython:
    """The server, as the pytest process sees it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # no terminal: what the processes print is buffered as in a pipe
                cwd="/",
                env=_environment_for_imports(),
            )
        self._exit_codes: dict[int, int] = {}
        self._started: list[int] = []
        self._start_lock = threading.Lock()  # tests start processes from several threads
        self._read_lock = threading.Lock()

    @property
    def pid(self) -> int:
        return self._server.pid

    def start(self, args: Sequence[str], cwd: Path, env: Mapping[str, str]) -> WarmProcess:
        """Start `python ARGS`, where these are `-m MODULE …` or `SCRIPT …`."""
        request = json.dumps({"args": list(args), "cwd": str(cwd), "env": dict(env)}).encode()
        assert len(request) < _MAX_REQUEST
        (out, their_out), (err, their_err) = os.pipe(), os.pipe()
        with self._start_lock:
            try:
                socket.send_fds(self._socket, [request], [their_out, their_err])
            finally:
                os.close(their_out)
                os.close(their_err)
            while not self._started:
                self._receive()
            pid = self._started.pop()
        return WarmProcess(self, pid, [sys.executable, *args], out, err)

    def exit_code(self, pid: int, timeout_s: float | None) -> int | None:
        """As `Popen.returncode`; None if the process still runs after `timeout_s`."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._receive(0.0)
        while pid not in self._exit_codes:
            if time.monotonic() >= deadline:
                return None
            self._receive()
        return self._exit_codes.pop(pid)  # a later process may have its number

    def close(self) -> None:
        self._socket.close()
        self._server.wait(timeout=10)

    def _receive(self, timeout_s: float = 0.02) -> None:
        """Take in a message of the server, if one comes within this time. Another thread may take in ours."""
        with self._read_lock:
            if not select.select([self._socket], [], [], timeout_s)[0]:
                return
            data = self._socket.recv(_MAX_REQUEST)
            if not data:
                raise RuntimeError("the server of warm Python processes has ended")
            message: dict[str, Any] = json.loads(data)
            if "ended" in message:
                self._exit_codes[message["ended"]] = message["code"]
            else:
                self._started.append(message["started"])


_server: WarmPython | None = None
_server_lock = threading.Lock()


def warm_python() -> WarmPython:
    """The server of this pytest process, started on first use, which may be in several threads at once."""
    global _server
    with _server_lock:
        if _server is None:
            _server = WarmPython()
        return _server


def close_warm_python() -> None:
    global _server
    if _server is not None:
        _server.close()
        _server = None


def warm_pids() -> set[int]:
    return set() if _server is None else {_server.pid}


def has_usual_imports(env: Mapping[str, str]) -> bool:
    """Would a fresh process with these variables import libraries as the server has?"""
    return _read_at_import(env) == _read_at_import(_environment_for_imports())


def _read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(READ_AT_IMPORT)}


def _environment_for_imports() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "LOCKSTEP_"))}


def _serve(link: socket.socket) -> dict[str, Any]:
    """Fork a process for each request, and report how each ends. Returns a request in the process forked for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which then end the server
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: set[int] = set()
    while True:
        ready, _, _ = select.select([link, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
            while children:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                children.discard(pid)
                link.send(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status)}).encode())
        if link in ready:
            data, fds, _, _ = socket.recv_fds(link, _MAX_REQUEST, _NUM_STREAMS)
            if not data:  # the pytest process has ended
                for pid in children:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                sys.exit(0)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for end in (wake_read, wake_write):
                    os.close(end)
                link.close()
                request: dict[str, Any] = json.loads(data)
                request["streams"] = fds
                return request
            children.add(pid)
            for fd in fds:
                os.close(fd)
            link.send(json.dumps({"started": pid}).encode())


def _become(request: dict[str, Any]) -> None:
    """In the forked process: run as `python ARGS` would."""
    for stream, number in zip(request["streams"], (1, 2), strict=False):  # none: they are in place
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    multiprocessing.process.ORIGINAL_DIR = request["cwd"]  # where its processes find a script
    tempfile.tempdir = None  # to be found again, from this environment
    numpy.random.seed()  # each process has its own, as when it imports numpy itself
    args = request["args"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    try:
        if args[0] == "-m":
            sys.argv = ["-m", *args[2:]]
            sys.path[0] = request["cwd"]
            runpy._run_module_as_main(args[1])  # what `python -m` calls
        else:
            path = Path(request["cwd"]) / args[0]
            sys.argv = list(args)
            sys.path[0] = str(path.parent)
            main.__file__, main.__loader__ = str(path), SourceFileLoader("__main__", str(path))
            main.__dict__.update({"__cached__": None, "__annotations__": {}})
            exec(compile(path.read_bytes(), path, "exec"), main.__dict__)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        assert error.__traceback__ is not None
        error = error.with_traceback(error.__traceback__.tb_next)  # without this function
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _fork_fork_server(connection: int, arguments: Sequence[str]) -> "subprocess.Popen[bytes]":
    """In an agent, in the place of `rank_processes.start_fork_server`: without a new interpreter."""
    if not _can_fork():
        return _start_fork_server(connection, arguments)
    threads = environment.threads_per_process()
    return subprocess.Popen(
        ["never executed"],
        start_new_session=True,
        restore_signals=False,  # a new interpreter would ignore SIGPIPE again
        preexec_fn=partial(_become_fork_server, connection, arguments, threads),  # which does not return
    )


def _fork_command(
    command: Sequence[str], variables: Mapping[str, str], output: int | IO[Any] | None, errors: int | IO[Any] | None
) -> "subprocess.Popen[bytes]":
    """In a command, in the place of `trial_runs.start_command`: a lockstep command without a new interpreter."""
    is_lockstep = list(command[:3]) == [sys.executable, "-m", "lockstep"]
    if not is_lockstep or not has_usual_imports(variables) or not _can_fork():
        return _start_command(command, variables, output, errors)
    return subprocess.Popen(
        ["never executed"],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        restore_signals=False,
        preexec_fn=partial(_become_command, command[1:], variables),  # which does not return
    )


def _can_fork() -> bool:
    """Flush what both processes would print, and look whether a thread may hold a lock that no fork would release."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return len(list(Path("/proc/self/task").iterdir())) == 1


def _become_command(args: Sequence[str], variables: Mapping[str, str]) -> None:
    """In the forked process: drop what a new interpreter would not have, run the command, and exit as Python does."""
    _drop_what_is_ours(descriptors_kept=())
    code = 1
    try:
        _become({"args": args, "env": dict(variables), "cwd": str(Path.cwd()), "streams": ()})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _become_fork_server(connection: int, arguments: Sequence[str], threads: int) -> None:
    """In the forked process: drop what a new interpreter would not have, and serve."""
    _drop_what_is_ours(descriptors_kept=(connection,))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    sys.argv = ["fork_server", str(connection), *arguments]
    try:
        fork_server.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _drop_what_is_ours(descriptors_kept: Sequence[int]) -> None:
    """In a process that Popen has forked: drop what belongs to the one that called Popen."""
    gc.enable()  # Popen has disabled it
    gc.collect()  # now: what is collected later may close a file that has the number of an earlier one
    gc.freeze()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for finalizer in _finalizers() - _finalizers_of_imports:
        finalizer.detach()  # the agent's temporary folders are for the agent to remove
    logging.getLogger("lockstep").handlers.clear()
    for fd in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if fd > 2 and fd not in descriptors_kept:
            with suppress(OSError):
                os.close(fd)


def _finalizers() -> set[Any]:
    return set(weakref.finalize._registry)  # type: ignore[attr-defined]


def _import_everything() -> None:
    """What commands import, so that their processes need not."""
    for name in (
        "sklearn.datasets",
        "torch._dynamo",  # by the first optimizer
        "torch.distributed.elastic.agent.server.local_elastic_agent",
        "torch.distributed.fsdp",
        "torch.utils.data",
        "lockstep.cli",
        "lockstep.launcher.launch_plan",
        "lockstep.loggers.logger_factory",
        "lockstep.recipes.registry",
        "lockstep.train.train_job",
        "lockstep.train.trainer",
    ):
        importlib.import_module(name)
    _finalizers_of_imports.update(_finalizers())
    gc.freeze()  # collecting it would copy the memory pages that the processes share


if __name__ == "__main__":
    _import_everything()
    rank_processes.start_fork_server = _fork_fork_server
    trial_runs.start_command = _fork_command
    _become(_serve(socket.socket(fileno=int(sys.argv[1]))))
