"""The options of every command that launches processes: torchrun's, by the same names, and options for supervision."""

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

from lockstep.config import environment
from lockstep.errors import UserError
from lockstep.launcher.launch_plan import LaunchPlan, OnHang, SupervisionOptions, check_plan
from lockstep.terminal_text import print_line

_DEFAULTS = SupervisionOptions()

# As an argument of a script it may be meant for us, unless it asks for the one process that runs anyway.
_NPROC_ARGUMENT = re.compile(r"(?:-n ?|--nproc[-_]per[-_]node[ =])(?!1$)(?:auto|\d+(?::\d+)?)")


def _options(
    nproc: Annotated[
        str | None,
        typer.Option(
            "-n",
            "--nproc-per-node",
            metavar="N|auto|MIN:MAX",
            help="Processes on this machine; auto: one per device; 2:4: start 4, or as few as 2 if restarts fail.",
        ),
    ] = None,
    nnodes: Annotated[int | None, typer.Option("--nnodes", metavar="N", help="Number of machines.")] = None,
    node_rank: Annotated[
        int | None, typer.Option("--node-rank", metavar="K", help="Index of this machine, from 0.")
    ] = None,
    master_addr: Annotated[
        str | None, typer.Option("--master-addr", metavar="HOST", help="Address of machine 0.")
    ] = None,
    master_port: Annotated[int | None, typer.Option("--master-port", metavar="PORT", help="Port on machine 0.")] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(
            "--rdzv-endpoint", metavar="HOST:PORT", help="Where machines meet; replaces --master-addr and -port."
        ),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            "--max-restarts",
            metavar="N",
            help="Restart all ranks at most N times without a new step; default: 3 for train, 0 for run.",
        ),
    ] = None,
    grace_s: Annotated[
        float, typer.Option("--grace", metavar="S", help="Seconds to save and exit after SIGTERM or Ctrl-C.")
    ] = _DEFAULTS.grace_s,
    hang_limit: Annotated[
        str,
        typer.Option(
            "--hang-limit",
            metavar="S|off",
            help="Seconds without a sign of life before a report, and before the end of ranks that cannot go on.",
        ),
    ] = f"{_DEFAULTS.hang_limit_s:g}",
    hang_stop: Annotated[
        str,
        typer.Option(
            "--hang-stop",
            metavar="S|off",
            help="Seconds without a sign of life before ranks that may only be slow are ended too.",
        ),
    ] = f"{_DEFAULTS.hang_stop_s:g}",
    on_hang: Annotated[
        OnHang | None,
        typer.Option("--on-hang", help="How to end a hang; default: restart a run that can resume, else stop."),
    ] = None,
    cold: Annotated[
        bool, typer.Option("--cold", help="Start each rank as a new Python process, not as a fork with torch imported.")
    ] = False,
    incidents: Annotated[
        Path | None,
        typer.Option(
            "--incidents", metavar="DIR", help="Folder for crash and hang reports of a job without a run folder."
        ),
    ] = None,
) -> None:
    """Declare the options; only its signature is used."""


def takes_launch_options(*, max_restarts: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command: replace its parameter `plan` with the launch options, from which the plan is made.

    `max_restarts` is the default of that option. The plan is None if this process does the work itself.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        options = inspect.signature(_options, eval_str=True).parameters
        own = inspect.signature(command, eval_str=True).parameters

        def run(**values: Any) -> None:
            given = {name: values.pop(name) for name in options}
            command(**values, plan=_make_plan(max_restarts, **given))

        both = [parameter for name, parameter in own.items() if name != "plan"] + list(options.values())
        both = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in both]
        run.__signature__ = inspect.Signature(both)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in both}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def check_launch_options(nproc: str, values: Mapping[str, Any]) -> None:
    """Raise the errors that a launch on `nproc` processes with these parsed options would raise."""
    given = {name: values[name] for name in inspect.signature(_options).parameters}
    plan = _make_plan(0, **(given | {"nproc": nproc}))
    if plan is not None:
        check_plan(plan)


def _make_plan(
    default_restarts: int,
    *,
    nproc: str | None,
    nnodes: int | None,
    node_rank: int | None,
    master_addr: str | None,
    master_port: int | None,
    rdzv_endpoint: str | None,
    max_restarts: int | None,
    grace_s: float,
    hang_limit: str,
    hang_stop: str,
    on_hang: OnHang | None,
    cold: bool,
    incidents: Path | None,
) -> LaunchPlan | None:
    """Return the launch to make, or None if this process does the work itself."""
    if nproc is None or environment.read_role(nproc_given=True) != "agent":
        if nproc is not None:
            _say_if_unused(nproc)
        given = {
            "--nnodes": nnodes,
            "--node-rank": node_rank,
            "--master-addr": master_addr,
            "--master-port": master_port,
            "--rdzv-endpoint": rdzv_endpoint,
            "--max-restarts": max_restarts,
            "--on-hang": on_hang,
            "--incidents": incidents,
        }
        for name, value in given.items():
            if value is not None:
                raise UserError(f"{name} {value} needs -n: add the number of processes on this machine")
        return None
    nproc_range = read_nproc(nproc)
    supervision = SupervisionOptions(
        max_restarts=default_restarts if max_restarts is None else max_restarts,
        min_nproc=nproc_range.least,
        grace_s=grace_s,
        hang_limit_s=_seconds("--hang-limit", hang_limit),
        hang_stop_s=_seconds("--hang-stop", hang_stop),
        on_hang=on_hang,
        is_warm=not cold,
        incidents=incidents,
    )
    return LaunchPlan(nproc_range.most, nnodes, node_rank, master_addr, master_port, rdzv_endpoint, supervision)


def describe_misplaced_nproc(target: Sequence[str]) -> str | None:
    """Return what to say if a script that was started on one process has an argument like our option `-n`.

    It may be the script's own, so it is no error.
    """
    start = 2 if target[0] == "-m" else 1
    script, arguments = " ".join(target[:start]), target[start:]
    pairs = map(" ".join, pairwise(arguments))
    given = next(filter(_NPROC_ARGUMENT.fullmatch, [*arguments, *pairs]), None)
    if given is None:
        return None
    return (
        f"{given} after {target[start - 1]} is an option of the script, and one process runs: "
        f"for several, write `lockstep run {given} {script}`"
    )


def _say_if_unused(nproc: str) -> None:
    """Say, on rank 0, that a launcher has started this process, with another number of processes than asked for."""
    place = environment.read_placement()
    if place.rank == 0 and read_nproc(nproc).most != place.local_world_size:
        print_line(
            f"lockstep: -n {nproc} is not used: a launcher has started this process as rank 0 of {place.world_size} "
            "(RANK, LOCAL_RANK): to start processes here, unset these",
            file=sys.stderr,
        )


class NprocRange(NamedTuple):
    """The value of the option `-n`."""

    most: int | Literal["auto"]  # started at first
    least: int | None  # None: never fewer


def read_nproc(nproc: str) -> NprocRange:
    """Read the option `-n`: a number, `auto`, or `least:most`."""
    if nproc == "auto":
        return NprocRange("auto", None)
    least, colon, most = nproc.rpartition(":")
    if not most.isdecimal() or (colon and not least.isdecimal()):
        raise UserError(f"-n {nproc}: expected a whole number, auto, or a minimum and a maximum, as in 2:4")
    return NprocRange(int(most), int(least) if colon else None)


def _seconds(option: str, text: str) -> float | None:
    if text == "off":
        return None
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{option} {text}: expected a number of seconds, or off") from None
