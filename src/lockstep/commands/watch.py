"""`lockstep watch`: a run as it goes on, in the terminal or in the browser. It only ever reads the run folder."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.errors import UserError
from lockstep.supervision.stop_signals import StopRequested

if TYPE_CHECKING:
    from lockstep.observe.live.follower import Follower

_REFRESH_S = 1.0
_WIDTH = 110  # characters, where there is no terminal to ask


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder; it need not be there yet.")],
    web: Annotated[bool, typer.Option("--web", help="A page for the browser, on this machine alone.")] = False,
    port: Annotated[
        int, typer.Option("--port", metavar="P", min=0, max=65535, help="For --web; default: a free one.")
    ] = 0,
    once: Annotated[bool, typer.Option("--once", help="Show it once, as it is now.")] = False,
    patience_s: Annotated[
        float, typer.Option("--patience", metavar="S", min=0, help="Seconds to wait for a run that was left.")
    ] = 30.0,
) -> None:
    """Watch a run: progress, numbers, where each rank's time goes, who is slow, what happened.

    \b
    lockstep watch runs/digits
    lockstep watch runs/digits --web

    Waits for a run that has not begun, and ends with it. Exit code 0: the run is at its end; 75: it was stopped before,
    and can go on; 3: it failed. A page is served until Ctrl-C. Watching cannot disturb a run.
    """
    from lockstep.observe.live.follower import Follower

    follower = Follower(run, patience_s)
    try:
        if once:
            if not run.exists():
                raise UserError(f"{run} is not there: without --once, it is waited for")
            _show_once(follower)
        elif web:
            _serve(follower, run, port)
        else:
            raise typer.Exit(_watch(follower))
    except StopRequested:
        raise typer.Exit(0) from None  # Ctrl-C is how one leaves


def _show_once(follower: "Follower") -> None:
    from rich.console import Console

    from lockstep.observe.live.screen import picture

    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=_WIDTH)
    console.print(picture(follower.look()))


def _watch(follower: "Follower") -> int:
    from rich.console import Console

    from lockstep.observe.live.screen import watch_on_terminal

    return watch_on_terminal(follower, Console(highlight=False))


def _serve(follower: "Follower", run: Path, port: int) -> None:
    from lockstep.observe.live.server import LivePage, PageServer
    from lockstep.observe.report.contents import run_contents

    page = LivePage(f"{run.resolve().name}: lockstep watch")
    server = PageServer(page, port)
    shown: tuple[object, ...] = ()
    try:
        page.publish(run_contents(*follower.look()))
        server.start()
        print(f"{run} is shown at {server.address} until Ctrl-C", flush=True)
        while True:
            began_s = time.process_time()
            view = follower.look()
            if (now := (follower.signature(), view.state.words)) != shown:
                page.publish(run_contents(*view))
                shown = now
            # Whoever trains on this machine needs it more: we take one part in twenty of a core at most.
            time.sleep(max(_REFRESH_S, 19 * (time.process_time() - began_s)))
    finally:
        server.stop()
