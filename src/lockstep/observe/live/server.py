"""The page that follows a run: the report itself, sent anew whenever the run folder has changed.

The standard library's server is enough for it: one page, one stream of server-sent events, a handful of readers on this
machine. It listens on loopback, answers GET for these two addresses, and never takes a file's name from a request.
"""

import json
import re
import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources

from lockstep.errors import UserError
from lockstep.observe.report.markup import Markup
from lockstep.observe.report.page import whole_page

_LOOPBACK = "127.0.0.1"
_OWN_NAMES = r"(127\.0\.0\.1|localhost)(:[0-9]{1,5})?"
_MOST_READERS = 16
_ALIVE_EVERY_S = 10.0
_TIMEOUT_S = 15.0
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class LivePage:
    """The newest contents, and whoever waits for them."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.readers = threading.BoundedSemaphore(_MOST_READERS)
        self._contents = Markup("")
        self._version = 0
        self._is_over = False
        self._changed = threading.Condition()

    def publish(self, contents: Markup) -> None:
        with self._changed:
            self._contents = contents
            self._version += 1
            self._changed.notify_all()

    def end(self) -> None:
        """Nobody need wait any longer."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def newest(self) -> Markup:
        with self._changed:
            return self._contents

    def wait(self, version: int, timeout_s: float) -> tuple[int, Markup] | None:
        """The contents as soon as they are newer than that, or when the time is over; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._version > version or self._is_over, timeout_s)
            return None if self._is_over else (self._version, self._contents)


class PageServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, page: LivePage, port: int) -> None:
        self.page = page
        try:
            super().__init__((_LOOPBACK, port), _Handler)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(f"--port {port} cannot be used: {reason}; without it, a free one is taken") from None

    @property
    def address(self) -> str:
        return f"http://{_LOOPBACK}:{self.server_port}/"

    def start(self) -> None:
        threading.Thread(target=self.serve_forever, name="lockstep-page", daemon=True).start()

    def stop(self) -> None:
        self.page.end()
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """A reader that went away is nothing to tell."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = _TIMEOUT_S
    server_version = "lockstep"
    sys_version = ""

    def do_GET(self) -> None:
        if not self._is_asked_by_name():
            # A stranger's page whose name was made to mean this machine sends its own name here.
            self._refuse(HTTPStatus.FORBIDDEN, "this page is for this machine: ask for 127.0.0.1 or localhost")
        elif self.path == "/":
            self._send_page()
        elif self.path == "/follow":
            self._follow()
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is nothing but / here")

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not told on the terminal."""

    def _is_asked_by_name(self) -> bool:
        """The port may be another one, where it is forwarded."""
        hosts = self.headers.get_all("Host") or []
        return len(hosts) == 1 and re.fullmatch(_OWN_NAMES, hosts[0], re.IGNORECASE) is not None

    def _send_page(self) -> None:
        script = resources.files(__package__).joinpath("live.js").read_text("utf-8")
        page = self.server.page
        text = whole_page(page.title, page.newest(), script, connects="'self'").encode()
        self._begin(HTTPStatus.OK, "text/html; charset=utf-8", len(text))
        self.wfile.write(text)

    def _follow(self) -> None:
        if not self.server.page.readers.acquire(blocking=False):
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, f"{_MOST_READERS} readers follow already")
            return
        try:
            self._begin(HTTPStatus.OK, "text/event-stream")
            self._send_changes()
        finally:
            self.server.page.readers.release()

    def _send_changes(self) -> None:
        version = 0
        with suppress(OSError):  # it has gone away
            while (news := self.server.page.wait(version, _ALIVE_EVERY_S)) is not None:
                newest, contents = news
                line = f"data: {json.dumps(contents)}" if newest > version else ": still here"
                self.wfile.write(f"{line}\n\n".encode())
                self.wfile.flush()
                version = newest

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        data = f"{text}\n".encode()
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
