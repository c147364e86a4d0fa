"""`lockstep watch`: follow a run live, in the terminal or in the browser. It only reads the run folder."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.errors import UserError
from lockstep.supervision.stop_signals import StopRequested
from lockstep.terminal_text import print_line

if TYPE_CHECKING:
    from lockstep.watch.run_follower import RunFollower

_REFRESH_S = 1.0
_MAX_CPU_SHARE = 0.05  # of one core: training on the same machine needs it more
_WIDTH = 110  # characters, if the output is not a terminal


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder; it need not exist yet.")],
    web: Annotated[bool, typer.Option("--web", help="Serve a page for browsers on this machine only.")] = False,
    port: Annotated[
        int,
        typer.Option(
            "--port",
            metavar="P",
            min=0,
            max=65535,
            show_default=False,
            help="The port for --web; default: any free port.",
        ),
    ] = 0,
    once: Annotated[bool, typer.Option("--once", help="Show the run once and exit.")] = False,
    patience_s: Annotated[
        float, typer.Option("--patience", metavar="S", min=0, help="Seconds to wait for a stopped run to start again.")
    ] = 30.0,
) -> None:
    """Watch a run: progress, metrics, where each rank's time goes, which rank is slow, and what happened.

    \b
    lockstep watch runs/digits
    lockstep watch runs/digits --web

    Waits for a run that has not started, and exits when it ends. Exit code 0: the run finished; 75: it was stopped and
    can be resumed; 3: it failed. With --web, serves the page until Ctrl-C. Watching cannot disturb a run.
    """
    from lockstep.watch.run_follower import RunFollower

    follower = RunFollower(run, patience_s)
    try:
        if once:
            if not run.exists():
                raise UserError(f"{run} does not exist: omit --once to wait for it")
            _show_once(follower)
        elif web:
            _serve(follower, run, port)
        else:
            raise typer.Exit(_watch(follower))
    except StopRequested:
        raise typer.Exit(0) from None  # Ctrl-C is the way to leave


def _show_once(follower: "RunFollower") -> None:
    from rich.console import Console

    from lockstep.watch.terminal_screen import render_run

    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=_WIDTH)
    console.print(render_run(follower.poll()))


def _watch(follower: "RunFollower") -> int:
    from rich.console import Console

    from lockstep.watch.terminal_screen import watch_on_terminal

    return watch_on_terminal(follower, Console(highlight=False))


def _serve(follower: "RunFollower", run: Path, port: int) -> None:
    from lockstep.report.page_contents import run_contents
    from lockstep.watch.page_server import LivePage, PageServer

    page = LivePage(f"{run.resolve().name}: lockstep watch")
    server = PageServer(page, port)
    shown: tuple[object, ...] = ()
    try:
        page.publish(run_contents(*follower.poll()))
        server.start()
        print_line(f"serving {run} at {server.address}; press Ctrl-C to stop", flush=True)
        while True:
            began_s = time.process_time()
            view = follower.poll()
            if (now := (follower.signature(), view.status.text)) != shown:
                page.publish(run_contents(*view))
                shown = now
            used_s = time.process_time() - began_s
            time.sleep(max(_REFRESH_S, used_s / _MAX_CPU_SHARE - used_s))
    finally:
        server.stop()
