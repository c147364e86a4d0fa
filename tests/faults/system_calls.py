"""Traces the system calls with which a function changes files, and can kill it before any of them.

The function runs in a forked process that is traced with ptrace, as by a debugger: calls of Python and of native
libraries are both seen. Linux only.
"""

import ctypes
import os
import platform
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_TRACEME, _SETOPTIONS, _SYSCALL, _GET_SYSCALL_INFO = 0, 0x4200, 24, 0x420E
_OPTIONS = 0x1 | 0x8 | 0x100000  # mark stops at system calls, trace new threads, die with the tracer
_AT_CALL = signal.SIGTRAP | 0x80
_ENTRY, _EXIT = 1, 2
_WALL = 0x40000000  # waitpid: also for threads
_PAGE = 4096
_HERE = -100  # as a folder's descriptor: the working directory

_CALLS = {
    "x86_64": {
        1: "write", 2: "open", 18: "pwrite", 20: "writev", 40: "sendfile", 74: "fsync", 75: "fsync", 76: "truncate",
        77: "ftruncate", 82: "rename", 83: "mkdir", 84: "rmdir", 85: "creat", 86: "link", 87: "unlink", 88: "symlink",
        257: "openat", 258: "mkdirat", 263: "unlinkat", 264: "renameat", 265: "linkat", 266: "symlinkat",
        285: "fallocate", 296: "pwritev", 316: "renameat", 326: "copy_file_range",
    },
    "aarch64": {
        34: "mkdirat", 35: "unlinkat", 36: "symlinkat", 37: "linkat", 38: "renameat", 45: "truncate", 46: "ftruncate",
        47: "fallocate", 56: "openat", 64: "write", 66: "writev", 68: "pwrite", 70: "pwritev", 71: "sendfile",
        82: "fsync", 83: "fsync", 276: "renameat", 285: "copy_file_range",
    },
}  # fmt: skip


class Call(NamedTuple):
    """A successful call under the root, independent of which of several equivalent system calls it was."""

    kind: str  # create, write, flush, mkdir, rename, remove
    path: str
    target: str = ""  # of a rename
    content: bytes = b""  # of the whole file, after a write


class Trace(NamedTuple):
    """What a traced function did."""

    calls: list[Call]
    was_killed: bool


class _CallInfo(ctypes.Structure):
    _fields_ = (
        ("op", ctypes.c_uint8),
        ("pad", ctypes.c_uint8 * 3),
        ("arch", ctypes.c_uint32),
        ("instruction", ctypes.c_uint64),
        ("stack", ctypes.c_uint64),
        ("number_or_result", ctypes.c_int64),
        ("arguments", ctypes.c_uint64 * 6),  # at the end of a call, the first byte says whether it failed
    )


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


def can_trace() -> bool:
    """Can system calls be traced on this machine?"""
    return platform.system() == "Linux" and platform.machine() in _CALLS


def trace(function: Callable[[], None], root: Path, kill_before: int | None = None) -> Trace:
    """Call the function in its own process; kill it before the call number `kill_before` (from 0) under `root`."""
    child = os.fork()
    if child == 0:
        try:
            _ptrace(_TRACEME, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            function()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)
    os.waitpid(child, 0)
    _ptrace(_SETOPTIONS, child, data=_OPTIONS)
    _ptrace(_SYSCALL, child)
    calls: list[Call] = []
    begun: dict[int, Call] = {}
    num_begun = 0
    for thread, stopped_by in _stops(child):
        passed_on = 0
        if stopped_by == _AT_CALL:
            info = _CallInfo()
            _ptrace(_GET_SYSCALL_INFO, thread, ctypes.sizeof(info), ctypes.addressof(info))
            if info.op == _ENTRY:
                call = _decode(thread, info)
                if call is not None and Path(call.path).is_relative_to(root):
                    if num_begun == kill_before:
                        os.kill(child, signal.SIGKILL)
                        for _ in _stops(child):
                            pass
                        return Trace(calls, was_killed=True)
                    num_begun += 1
                    begun[thread] = call
            elif info.op == _EXIT and thread in begun:
                call = begun.pop(thread)
                is_error = info.arguments[0] & 0xFF
                if not is_error:
                    calls.append(call._replace(content=Path(call.path).read_bytes()) if call.kind == "write" else call)
        elif stopped_by not in (signal.SIGSTOP, signal.SIGTRAP):  # these two announce a new thread
            passed_on = stopped_by
        _ptrace(_SYSCALL, thread, data=passed_on)
    return Trace(calls, was_killed=False)


def _stops(child: int) -> Iterator[tuple[int, int]]:
    """Yield each thread that stops and its signal, until the process exits; a failing exit code is an error."""
    while True:
        thread, status = os.waitpid(-1, _WALL)
        if os.WIFSTOPPED(status):
            yield thread, os.WSTOPSIG(status)
        elif thread == child:
            if os.WIFEXITED(status) and os.WEXITSTATUS(status):
                raise AssertionError("the traced function failed")
            return


def _ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> None:
    if _libc.ptrace(request, pid, address, data) < 0:
        code = ctypes.get_errno()
        with suppress(ProcessLookupError):  # the thread has just ended
            raise OSError(code, f"ptrace: {os.strerror(code)}")


def _decode(thread: int, info: _CallInfo) -> Call | None:
    """Return what a call is about to do to which file, or None if it changes no file."""
    name = _CALLS[platform.machine()].get(info.number_or_result)
    first, second, third, fourth = (ctypes.c_int64(value).value for value in info.arguments[:4])
    match name:
        case None:
            return None
        case "write" | "pwrite" | "writev" | "pwritev" | "ftruncate" | "fallocate":
            return Call("write", _opened(thread, first))
        case "fsync":
            return Call("flush", _opened(thread, first))
        case "open" | "openat":
            path, flags = (first, second) if name == "open" else (second, third)
            if not flags & os.O_CREAT:
                return None
            return Call("create", _path(thread, _HERE if name == "open" else first, path))
        case "mkdir" | "mkdirat":
            return Call("mkdir", _path(thread, *(_HERE, first) if name == "mkdir" else (first, second)))
        case "unlink" | "rmdir" | "unlinkat":
            return Call("remove", _path(thread, *(first, second) if name == "unlinkat" else (_HERE, first)))
        case "rename":
            return Call("rename", _path(thread, _HERE, first), _path(thread, _HERE, second))
        case "renameat":
            return Call("rename", _path(thread, first, second), _path(thread, third, fourth))
    raise AssertionError(f"{name}: this call is not modelled")


def _path(thread: int, folder: int, address: int) -> str:
    data = b""
    with Path(f"/proc/{thread}/mem").open("rb", buffering=0) as memory:
        while b"\0" not in data:
            memory.seek(address + len(data))
            data += memory.read(_PAGE - (address + len(data)) % _PAGE)  # the next page may not be mapped
    name = os.fsdecode(data[: data.index(b"\0")])
    folder = ctypes.c_int32(folder).value
    base = Path(f"/proc/{thread}/cwd").readlink() if folder == _HERE else Path(_opened(thread, folder))
    return os.path.normpath(base / name)


def _opened(thread: int, descriptor: int) -> str:
    try:
        return str(Path(f"/proc/{thread}/fd/{ctypes.c_int32(descriptor).value}").readlink())
    except FileNotFoundError:  # no file is open under this number
        return ""
