"""The TCPStore at which the processes of a job meet, hosted at the given address."""

import errno
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from lockstep.config.placement import is_loopback
from lockstep.errors import WorldError
from lockstep.terminal_text import print_line

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore  # for its types, which the public name lacks
else:
    from torch.distributed import Store, TCPStore

_RESOLVE_INTERVAL_S = 0.5
_SIOCGIFADDR = 0x8915  # Linux: the ioctl for an interface's IPv4 address


def host_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    """Host a store. With `port=0` it takes a free port: see the returned store's `port`."""
    listener = _listen(address, port)
    return TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        # By default the store listens on every interface; given a socket that we have bound, it listens only there.
        master_listen_fd=listener.detach(),
    )


def connect_store(address: str, port: int, timeout: timedelta, who: str) -> TCPStore:
    """Connect to a store that another process hosts; wait until it is there.

    Args:
        address: the store's address.
        port: the store's port.
        timeout: for the connection, and for later requests.
        who: this process, for an error message: `rank 1`.
    """
    try:
        _wait_for_listener(address, port, timeout.total_seconds())
        return TCPStore(address, port, is_master=False, timeout=timeout)
    except (OSError, RuntimeError) as error:  # RuntimeError is the base of torch's network and store errors
        raise WorldError(
            f"{who} cannot reach the job's store at {address}:{port} (MASTER_ADDR, MASTER_PORT) within "
            f"{timeout.total_seconds():g} s: {str(error).splitlines()[0][:200]}"
        ) from None


def wait_for_keys(store: Store, keys: Sequence[str], deadline: float) -> list[int]:
    """Wait until all keys are set; return the indices of those that are missing at the deadline (`time.monotonic`).

    This polls, because Python handles neither Ctrl-C nor SIGTERM inside the store's own wait.
    """
    pauses = _pauses()
    while not store.check(list(keys)):
        if time.monotonic() > deadline:
            return [index for index, key in enumerate(keys) if not store.check([key])]
        time.sleep(next(pauses))
    return []


def _pauses() -> Iterator[float]:
    """Yield the pauses between tries, in seconds: exponential backoff."""
    pause_s = 0.002
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, 0.1)


def wait_for_hostname(address: str, timeout_s: float) -> None:
    """Wait until a hostname resolves or the time is up: on a cluster, it may resolve only once the host is up."""
    if _resolves(address):
        return
    print_line(f"lockstep: {address} does not resolve yet: waiting for up to {timeout_s:g} s", file=sys.stderr)
    deadline = time.monotonic() + timeout_s
    while not _resolves(address) and time.monotonic() < deadline:  # after that, the connection fails with a message
        time.sleep(_RESOLVE_INTERVAL_S)


def _resolves(address: str) -> bool:
    try:
        return bool(socket.getaddrinfo(address, None))
    except socket.gaierror:
        return False


def _wait_for_listener(address: str, port: int, timeout_s: float) -> None:
    """Wait until something listens there: a TCPStore client that is refused retries late and logs at length."""
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
    """Return the network interface through which this machine reaches an address, or None if that is unknown.

    By default gloo uses the address that this machine's hostname resolves to. On many machines that is loopback, which
    other machines cannot reach.
    """
    if is_loopback(address):
        names = [name for _, name in socket.if_nameindex()]
        return next((name for name in ("lo", "lo0") if name in names), "lo")  # on Linux; on a Mac
    if sys.platform != "linux":
        return None
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))  # sends nothing: the kernel chooses the route
        own = probe.getsockname()[0]
        if not is_loopback(own):
            return next((name for _, name in socket.if_nameindex() if _address_of(name, probe) == own), None)
    return None


def is_own_address(address: str) -> bool:
    """Does the address, or the name of a host, belong to an interface of this machine?"""
    with suppress(OSError):
        socket.create_server((address, 0), family=_family(address, 0)).close()
        return True
    return False


def _address_of(interface: str, any_socket: socket.socket) -> str | None:
    import fcntl  # does not exist on Windows

    with suppress(OSError):  # the interface has no address
        answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        return socket.inet_ntoa(answer[20:24])
    return None


def _listen(address: str, port: int) -> socket.socket:
    try:
        return _listen_at(address, port)
    except socket.gaierror:
        raise WorldError(f"MASTER_ADDR={address} is not a known host: check its spelling and your DNS") from None
    except OSError as error:
        # A cluster's service address belongs to no interface of this machine: listen on all of them.
        if error.errno == errno.EADDRNOTAVAIL and not is_loopback(address):
            return _listen_at("", port)
        raise WorldError(
            f"cannot listen on {address}:{port} ({error.strerror}): set MASTER_PORT to another port"
        ) from None


def _listen_at(address: str, port: int) -> socket.socket:
    if _is_own_name_on_loopback(address):
        address = ""
    return socket.create_server((address, port), family=_family(address, port), backlog=1024)


def _is_own_name_on_loopback(address: str) -> bool:
    """Does this machine know its own name as a loopback address, as on Debian? Others find it at another address."""
    return (
        address in (socket.gethostname(), socket.getfqdn())
        and not is_loopback(address)
        and all(is_loopback(str(found[0])) for *_, found in socket.getaddrinfo(address, None))
    )


def _family(address: str, port: int) -> socket.AddressFamily:
    return socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0] if address else socket.AF_INET
