"""Watching: what the terminal shows, when it ends, and a page that only this machine can ask for."""

import http.client
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.errors import EXIT_FAILED, EXIT_STOPPED, UserError
from lockstep.events.run_folder import RunFolder
from lockstep.observe.curve import Curve
from lockstep.observe.live import screen
from lockstep.observe.live.follower import Follower
from lockstep.observe.live.server import LivePage, PageServer
from lockstep.observe.presence import presence
from lockstep.observe.report.markup import Markup
from tests.run_folders import append, event, finished_run, start, timed, write_run


def shown(follower: Follower) -> str:
    console = Console(file=io.StringIO(), width=110)
    with console.capture() as captured:
        console.print(screen.picture(follower.look()))
    return captured.get()


def test_one_picture_has_progress_numbers_bars_and_the_verdict(tmp_path: Path) -> None:
    waits = [timed(step, exchange_s=0.13) for step in (10, 20, 30, 40)]
    slow = [timed(step, compute_s=0.21) for step in (10, 20, 30, 40)]
    events = [
        start(),
        *(event("step", step, loss=4.0 / step) for step in (10, 20)),
        event("incident", 20, text="[red]no"),
    ]
    text = shown(Follower(write_run(tmp_path, events, {0: waits, 1: slow}), 0))
    for part in ("50 %", "loss", "0.2", "rank 1 is slow", "waiting for gradients", "[red]no", "3 s to go"):
        assert part in text
    bars = [line for line in text.splitlines() if line.startswith("rank ") and "█" in line]
    assert [bar.count("░") for bar in bars] == [23, 4]  # of 48 characters: 130 and 20 of 270 ms


def test_a_curve_in_a_line() -> None:
    curve = Curve()
    for step, value in enumerate([0.0, 1.0, 2.0, 7.0]):
        curve.add(step, value)
    assert screen.sparks(curve) == "▁▂▃█"


def test_it_waits_for_a_run_and_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sleep is a stage of the run."""
    folder = tmp_path / "mine"
    stages = iter(
        [
            lambda: folder.mkdir(),
            lambda: write_run(folder, [start()]),
            lambda: append(folder / "events.jsonl", [event("step", 10, loss=0.25)]),
            lambda: append(folder / "events.jsonl", [event("end", 40, digest="x")]),
        ]
    )
    monkeypatch.setattr(screen.time, "sleep", lambda _: next(stages)())
    output = io.StringIO()
    assert screen.watch_on_terminal(Follower(folder, 60), Console(file=output, width=80)) == 0
    lines = output.getvalue().splitlines()
    assert lines[0] == f"waiting for {folder}"
    assert lines[1] == "it has not begun"
    assert "loss 0.25" in lines[3]
    assert lines[-1].startswith("at its end, after step 40 of 40")


def test_a_run_that_was_left_is_waited_for_and_then_told(tmp_path: Path) -> None:
    follower = Follower(write_run(tmp_path, [start()]), patience_s=30)
    view = follower.look()
    assert [follower.exit_code(view, now) for now in (0.0, 29.0, 31.0)] == [None, None, EXIT_STOPPED]
    (tmp_path / "incidents").mkdir()
    (tmp_path / "incidents" / "a.json").write_text('{"t": 1e9, "text": "rank 1 was killed"}')
    assert follower.exit_code(follower.look(), 32.0) == EXIT_FAILED


def test_whoever_trains_in_a_folder_is_seen(
    tmp_path: Path,
) -> None:
    import subprocess
    import sys

    assert presence(tmp_path).is_here is False
    code = (
        "import sys; from pathlib import Path; from lockstep.events.run_folder import RunFolder\n"
        "lock = RunFolder(Path(sys.argv[1]))._lock(); print('here', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "here\n"
        found = presence(tmp_path)
        assert found.is_here
        assert found.who.startswith(f"process {holder.pid} on ")
        with pytest.raises(UserError, match="is in use"):  # looking at the lock has not taken it away
            RunFolder(tmp_path)._lock()
    finally:
        holder.communicate()
    assert presence(tmp_path).is_here is False


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


def ask(server: PageServer, path: str = "/", method: str = "GET", host: str | None = None) -> tuple[int, str]:
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


def test_the_page_is_served_on_loopback_to_those_who_ask_for_this_machine() -> None:
    with serving("<p>one</p>") as server:
        assert server.server_address[0] == "127.0.0.1"
        status, text = ask(server)
        assert (status, "<p>one</p>" in text, "EventSource" in text) == (200, True, True)
        assert "connect-src 'self'" in text
        assert ask(server, host="localhost:9")[0] == 200  # a forwarded port
        for stranger in ("evil.example", "127.0.0.1.evil.example:80", "localhost.evil.example", "x@127.0.0.1:1", ""):
            assert ask(server, host=stranger)[0] == 403
        for path in ("/etc/passwd", "/../run.json", "/?a", "/%2e%2e/run.json"):
            assert ask(server, path)[0] == 404
        for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
            assert ask(server, method=method)[0] == 501


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


def test_a_port_in_use_is_told() -> None:
    with serving("") as server, pytest.raises(UserError, match=f"--port {server.server_port} cannot be used"):
        PageServer(LivePage("other"), server.server_port)


def test_what_is_new_is_noticed(tmp_path: Path) -> None:
    follower = Follower(finished_run(tmp_path / "mine"), 0)
    before = follower.signature()
    assert follower.signature() == before
    append(tmp_path / "mine" / "ranks" / "1.jsonl", [timed(50)])
    assert follower.signature() != before
