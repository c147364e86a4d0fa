"""The live page is served to this machine only, and changes are sent as they come."""

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lockstep.errors import UserError
from lockstep.report.html_page import Markup
from lockstep.watch.page_server import LivePage, PageServer


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


def request(server: PageServer, path: str = "/", method: str = "GET", host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    try:
        connection.putrequest(method, path, skip_host=True)
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
        for path in ("/etc/passwd", "/../run.json", "/?a", "/%2e%2e/run.json"):
            assert request(server, path)[0] == 404
        for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
            assert request(server, method=method)[0] == 501


def test_changes_are_sent_as_they_come() -> None:
    with serving("<p>one</p>") as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
        connection.request("GET", "/follow")
        answer = connection.getresponse()
        assert answer.getheader("Content-Type") == "text/event-stream"
        assert json.loads(answer.readline().removeprefix(b"data: ")) == "<p>one</p>"
        answer.readline()
        server.page.publish(Markup("<p>two\nlines</p>"))
        assert json.loads(answer.readline().removeprefix(b"data: ")) == "<p>two\nlines</p>"
        connection.close()


def test_a_port_in_use_is_an_error() -> None:
    with serving("") as server, pytest.raises(UserError, match=f"--port {server.server_port} cannot be used"):
        PageServer(LivePage("other"), server.server_port)
