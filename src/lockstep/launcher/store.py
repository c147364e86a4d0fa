"""The key-value store at which the processes of a job meet, held at exactly the address we say."""

import errno
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore  # torch.distributed re-exports these untyped

from lockstep.config.placement import is_loopback
from lockstep.errors import WorldError

_ASK_FOR_NAME_EVERY_S = 0.5


def hold_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    """Host a store; `port=0` takes a free one, which the returned store names."""
    listener = _listen(address, port)
    return TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        # Left to itself the store listens on every interface; a socket we bound listens where we say.
        master_listen_fd=listener.detach(),
    )


def reach_store(address: str, port: int, timeout: timedelta, who: str) -> TCPStore:
    """Connect to a store somebody else holds, waiting until it is there."""
    try:
        _await_listener(address, port, timeout.total_seconds())
        return TCPStore(address, port, is_master=False, timeout=timeout)
    except (OSError, RuntimeError) as error:  # RuntimeError is the base of torch's network and store errors
        raise WorldError(
            f"{who} cannot reach the job's store at {address}:{port} (MASTER_ADDR, MASTER_PORT) within "
            f"{timeout.total_seconds():g} s: {str(error).splitlines()[0][:200]}"
        ) from None


def await_keys(store: Store, keys: Sequence[str], deadline: float) -> list[int]:
    """Wait until all keys are set; return the indices of those that are missing at the (monotonic) deadline.

    By asking again and again: inside the store's own wait Python would see neither Ctrl-C nor SIGTERM.
    """
    pauses = _pauses()
    while not store.check(list(keys)):
        if time.monotonic() > deadline:
            return [index for index, key in enumerate(keys) if not store.check([key])]
        time.sleep(next(pauses))
    return []


def _pauses() -> Iterator[float]:
    """How long to wait before asking again, in seconds: briefly at first, then less and less often."""
    pause_s = 0.002
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, 0.1)


def await_name(address: str, timeout_s: float) -> None:
    """Return once a host is known by its name, or after a while: a cluster may learn the name only when it is up."""
    if _is_known(address):
        return
    print(f"lockstep: {address} is not a known host yet: waiting for that, {timeout_s:g} s at most", file=sys.stderr)
    deadline = time.monotonic() + timeout_s
    while not _is_known(address) and time.monotonic() < deadline:  # then who needs it will say so
        time.sleep(_ASK_FOR_NAME_EVERY_S)


def _is_known(address: str) -> bool:
    try:
        return bool(socket.getaddrinfo(address, None))
    except socket.gaierror:
        return False


def _await_listener(address: str, port: int, timeout_s: float) -> None:
    """Return once somebody listens. The store's own client, refused once, tries again late and complains at length."""
    deadline = time.monotonic() + timeout_s
    for pause_s in _pauses():
        try:
            socket.create_connection((address, port), timeout=max(deadline - time.monotonic(), 0.001)).close()
            return
        except OSError:
            if time.monotonic() + pause_s > deadline:
                raise
        time.sleep(pause_s)


def interface_towards(address: str) -> str | None:
    """The interface over which this machine reaches an address, also its own; None where that cannot be told.

    Left to itself gloo takes the address that this machine's own name stands for, and on many a machine that is
    loopback, where other machines do not find it.
    """
    if is_loopback(address):
        names = [name for _, name in socket.if_nameindex()]
        return next((name for name in ("lo", "lo0") if name in names), "lo")  # on Linux; on a Mac
    if sys.platform != "linux":
        return None
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))  # sends nothing: the kernel says which way it would go
        own = probe.getsockname()[0]
        if not is_loopback(own):
            return next((name for _, name in socket.if_nameindex() if _address_of(name, probe) == own), None)
    return None


def _address_of(interface: str, any_socket: socket.socket) -> str | None:
    import fcntl  # not there on Windows

    with suppress(OSError):  # it has none
        answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        return socket.inet_ntoa(answer[20:24])
    return None


_SIOCGIFADDR = 0x8915  # Linux: an interface's IPv4 address


def _listen(address: str, port: int) -> socket.socket:
    try:
        return _listen_at(address, port)
    except socket.gaierror:
        raise WorldError(f"MASTER_ADDR={address} is not a known host: check its spelling and your DNS") from None
    except OSError as error:
        # A cluster's service address is not an interface of this machine: listen on all, as asked for several machines.
        if error.errno == errno.EADDRNOTAVAIL and not is_loopback(address):
            return _listen_at("", port)
        raise WorldError(
            f"cannot listen on {address}:{port} ({error.strerror}): set MASTER_PORT to another port"
        ) from None


def _listen_at(address: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0] if address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=1024)
