"""The live page is served to this machine only, and changes are sent as they come."""

import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from lockstep.errors import UserError
from lockstep.report.html_page import Markup
from lockstep.watch import page_server
from lockstep.watch.page_server import LivePage, PageServer
from tests.commands import wait_for


@contextmanager
def serving(contents: str) -> Iterator[PageServer]:
    page = LivePage("mine")
    page.publish(Markup(contents))
    server = PageServer(page, 0)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def connect(server: PageServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=10)


def request(
    server: PageServer, path: str = "", method: str = "GET", host: str | None = None, token: str | None = None
) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    try:
        connection.putrequest(method, f"/{server.token if token is None else token}/{path}", skip_host=True)
        if host != "":
            connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_the_page_is_served_on_loopback_to_requests_that_name_this_machine() -> None:
    with serving("<p>one</p>") as server:
        assert server.server_address[0] == "127.0.0.1"
        status, text = request(server)
        assert (status, "<p>one</p>" in text, "EventSource" in text) == (200, True, True)
        assert "connect-src 'self'" in text
        assert request(server, host="localhost:9")[0] == 200  # a forwarded port
        for foreign in ("evil.example", "127.0.0.1.evil.example:80", "localhost.evil.example", "x@127.0.0.1:1", ""):
            assert request(server, host=foreign)[0] == 403
        for path in ("/", "etc/passwd", "../run.json", "?a", "%2e%2e/run.json", "follow/"):
            assert request(server, path)[0] == 404
        for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
            assert request(server, method=method)[0] == 501


def test_changes_are_sent_as_they_come() -> None:
    with serving("<p>one</p>") as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
        connection.request("GET", f"/{server.token}/follow")
        answer = connection.getresponse()
        assert answer.getheader("Content-Type") == "text/event-stream"
        assert json.loads(answer.readline().removeprefix(b"data: ")) == "<p>one</p>"
        answer.readline()
        server.page.publish(Markup("<p>two\nlines</p>"))
        assert json.loads(answer.readline().removeprefix(b"data: ")) == "<p>two\nlines</p>"
        connection.close()


@pytest.mark.parametrize("path", ["", "follow", "../"])
def test_a_request_without_the_token_learns_nothing(path: str) -> None:
    """Every user of the machine can connect, also those who cannot read the run's folder."""
    with serving("<p>one</p>") as server:
        assert server.address.endswith(f"/{server.token}/")
        for token in ("", "x", server.token[:-1], server.token + "x", server.token.swapcase(), "%E9"):
            assert request(server, path, token=token) == (403, "")
        with connect(server) as bare:
            bare.sendall(f"GET {path or '/'} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
            assert bare.makefile().read().startswith("HTTP/1.0 403")


def test_every_page_has_a_token_of_its_own() -> None:
    with serving("") as one, serving("") as other:
        assert one.token != other.token
        assert request(other, token=one.token) == (403, "")


def test_a_request_that_arrives_too_slowly_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "_REQUEST_WITHIN_S", 0.2)
    with serving("") as server, connect(server) as slow, pytest.raises(OSError, match=r"reset|Broken pipe"):
        for byte in b"GET / HTTP/1.0\r\nA: " + b"b" * 300:
            slow.send(bytes([byte]))
            time.sleep(0.02)


def test_there_is_a_limit_on_connections_and_ended_ones_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "_MAX_CONNECTIONS", 2)
    with serving("") as server:
        with ExitStack() as stack:
            for _ in range(2):
                stack.enter_context(connect(server))
            with connect(server) as third:
                assert third.makefile().read().startswith("HTTP/1.0 503")
        wait_for(lambda: request(server)[0] == 200, 10, "a free connection")


def test_a_port_in_use_is_an_error() -> None:
    with serving("") as server, pytest.raises(UserError, match=f"--port {server.server_port} cannot be used"):
        PageServer(LivePage("other"), server.server_port)
