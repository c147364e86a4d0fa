"""Serve a run's report as a live page on loopback, and resend it whenever the run folder changes.

The standard library's server is enough: one page, one stream of server-sent events, a handful of readers on this
machine. It answers GET for these two paths only, and never takes a file name from a request.

Every user of the machine can connect to loopback. So the address contains a random token, without which nothing is
answered; and requests have a deadline and connections a limit, so that others cannot use up this process's threads.
"""

import hmac
import io
import json
import re
import secrets
import socket
import threading
import time
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any

from lockstep.errors import UserError
from lockstep.report.html_page import Markup, render_page

_LOOPBACK = "127.0.0.1"
_OWN_HOSTS = r"(127\.0\.0\.1|localhost)(:[0-9]{1,5})?"
_MAX_READERS = 16
_MAX_CONNECTIONS = 32  # the readers' among them
_KEEP_ALIVE_S = 10.0
_REQUEST_WITHIN_S = 5.0  # from the connection to the end of the header, however many bytes arrive meanwhile
_SEND_WITHIN_S = 15.0
_TOO_MANY = b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class LivePage:
    """The newest contents of the page, for readers that wait for changes."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.readers = threading.BoundedSemaphore(_MAX_READERS)
        self._contents = Markup("")
        self._version = 0
        self._is_over = False
        self._changed = threading.Condition()

    def publish(self, contents: Markup) -> None:
        """Replace the contents, and wake up all readers."""
        with self._changed:
            self._contents = contents
            self._version += 1
            self._changed.notify_all()

    def end(self) -> None:
        """Release all readers: there will be no further contents."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def newest(self) -> Markup:
        """Return the newest contents."""
        with self._changed:
            return self._contents

    def wait(self, version: int, timeout_s: float) -> tuple[int, Markup] | None:
        """Wait for contents newer than `version`; return the newest after `timeout_s` in any case, None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._version > version or self._is_over, timeout_s)
            return None if self._is_over else (self._version, self._contents)


class PageServer(ThreadingHTTPServer):
    """Serves a `LivePage` on loopback, in a thread.

    Args:
        page: the page to serve.
        port: the port to listen on; 0 for any free one.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, page: LivePage, port: int) -> None:
        self.page = page
        self.token = secrets.token_urlsafe()
        self._free_connections = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        try:
            super().__init__((_LOOPBACK, port), _Handler)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(f"--port {port} cannot be used: {reason}; omit it to use any free port") from None

    @property
    def address(self) -> str:
        """The URL of the page, with the token."""
        return f"http://{_LOOPBACK}:{self.server_port}/{self.token}/"

    def start(self) -> None:
        """Serve in a background thread."""
        threading.Thread(target=self.serve_forever, name="lockstep-page", daemon=True).start()

    def stop(self) -> None:
        """Release all readers and stop serving."""
        self.page.end()
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a request in a thread of its own, or refuse it if there are too many."""
        if self._free_connections.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        with suppress(OSError):
            request.setblocking(False)
            request.send(_TOO_MANY)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle a request, in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free_connections.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: a reader that disconnects is not an error."""


class _InputWithDeadline(io.RawIOBase):
    """What arrives on a connection until a deadline. A timeout alone begins anew with every byte."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version = "lockstep"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        deadline = time.monotonic() + _REQUEST_WITHIN_S
        self.rfile = io.BufferedReader(_InputWithDeadline(self.connection, deadline))

    def do_GET(self) -> None:
        self.connection.settimeout(_SEND_WITHIN_S)
        found = re.fullmatch(r"/([^/]*)/(.*)", self.path)
        token, path = found.groups() if found else ("", "")
        if not self._has_own_host():
            # DNS rebinding: a foreign page whose name resolves to this machine sends that name as the host.
            self._refuse(HTTPStatus.FORBIDDEN, "this page is for this machine only: use 127.0.0.1 or localhost")
        elif not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(HTTPStatus.FORBIDDEN)
        elif path == "":
            self._send_page()
        elif path == "follow":
            self._follow()
        else:
            self._refuse(HTTPStatus.NOT_FOUND)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: requests would clutter the terminal."""

    def _has_own_host(self) -> bool:
        """Does the request name this machine? The port may differ if it is forwarded."""
        hosts = self.headers.get_all("Host") or []
        return len(hosts) == 1 and re.fullmatch(_OWN_HOSTS, hosts[0], re.IGNORECASE) is not None

    def _send_page(self) -> None:
        script = resources.files(__package__).joinpath("live.js").read_text("utf-8")
        page = self.server.page
        text = render_page(page.title, page.newest(), script, connect_src="'self'").encode()
        self._begin(HTTPStatus.OK, "text/html; charset=utf-8", len(text))
        self.wfile.write(text)

    def _follow(self) -> None:
        if not self.server.page.readers.acquire(blocking=False):
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, f"there are already {_MAX_READERS} readers")
            return
        try:
            self._begin(HTTPStatus.OK, "text/event-stream")
            self._send_changes()
        finally:
            self.server.page.readers.release()

    def _send_changes(self) -> None:
        version = 0
        with suppress(OSError):  # the reader has disconnected
            while (news := self.server.page.wait(version, _KEEP_ALIVE_S)) is not None:
                newest, contents = news
                line = f"data: {json.dumps(contents)}" if newest > version else ": keep-alive"
                self.wfile.write(f"{line}\n\n".encode())
                self.wfile.flush()
                version = newest

    def _refuse(self, status: HTTPStatus, text: str = "") -> None:
        data = f"{text}\n".encode() if text else b""
        self._begin(status, "text/plain; charset=utf-8", len(data))
        self.wfile.write(data)

    def _begin(self, status: HTTPStatus, kind: str, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if length is not None:
            self.send_header("Content-Length", str(length))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
