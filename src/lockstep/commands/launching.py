"""The options of every command that launches: torchrun's by the same names, and what to do when not all goes well."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lockstep.config import environment
from lockstep.errors import UserError
from lockstep.launcher.plan import LaunchPlan, OnHang, Supervision, check

_DEFAULTS = Supervision()


def _options(
    nproc: Annotated[
        str | None,
        typer.Option(
            "-n",
            "--nproc-per-node",
            metavar="N|auto|MIN:MAX",
            help="Processes on this machine; auto: one per device; 2:4: four, and fewer where a restart does not help.",
        ),
    ] = None,
    nnodes: Annotated[int | None, typer.Option("--nnodes", metavar="N", help="Machines in the job.")] = None,
    node_rank: Annotated[
        int | None, typer.Option("--node-rank", metavar="K", help="Number of this machine, from 0.")
    ] = None,
    master_addr: Annotated[
        str | None, typer.Option("--master-addr", metavar="HOST", help="Address of machine 0.")
    ] = None,
    master_port: Annotated[int | None, typer.Option("--master-port", metavar="PORT", help="Port on machine 0.")] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option("--rdzv-endpoint", metavar="HOST:PORT", help="Where machines meet, instead of the above."),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option("--max-restarts", metavar="N", help="Restarts of all ranks in a row without a new step."),
    ] = None,
    grace_s: Annotated[
        float, typer.Option("--grace", metavar="S", help="Seconds to save and end after SIGTERM or Ctrl-C.")
    ] = _DEFAULTS.grace_s,
    hang_limit: Annotated[
        str,
        typer.Option(
            "--hang-limit",
            metavar="S|off",
            help="Seconds without a sign of life that are no hang yet; the limit grows with what the run has needed.",
        ),
    ] = f"{_DEFAULTS.hang_limit_s:g}",
    on_hang: Annotated[
        OnHang | None,
        typer.Option("--on-hang", help="After a hang was explained; default: restart what can resume, else stop."),
    ] = None,
    cold: Annotated[
        bool, typer.Option("--cold", help="Start every rank as a fresh Python, not as a fork that has torch already.")
    ] = False,
    incidents: Annotated[
        Path | None,
        typer.Option("--incidents", metavar="DIR", help="Crash and hang reports of a job that has no run folder."),
    ] = None,
) -> None:
    """Only its signature is used."""


def takes_launch_options(*, max_restarts: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the launch options in place of its parameter `plan`; `max_restarts`: unless the user says."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        options = inspect.signature(_options, eval_str=True).parameters
        own = inspect.signature(command, eval_str=True).parameters

        def run(**values: Any) -> None:
            given = {name: values.pop(name) for name in options}
            command(**values, plan=_plan(max_restarts, **given))

        both = [parameter for name, parameter in own.items() if name != "plan"] + list(options.values())
        both = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in both]
        run.__signature__ = inspect.Signature(both)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in both}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def check_launch_options(nproc: str, values: Mapping[str, Any]) -> None:
    """Refuse what a launch with such options, on so many processes, would refuse."""
    given = {name: values[name] for name in inspect.signature(_options).parameters}
    plan = _plan(0, **(given | {"nproc": nproc}))
    if plan is not None:
        check(plan)


def _plan(
    usual_restarts: int,
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
    on_hang: OnHang | None,
    cold: bool,
    incidents: Path | None,
) -> LaunchPlan | None:
    """The launch to make, or None where this process is to do the work itself."""
    if nproc is None or environment.role(nproc_given=True) != "agent":
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
                raise UserError(f"{name} {value} needs -n: how many processes on this machine?")
        return None
    processes, least = read_nproc(nproc)
    supervision = Supervision(
        max_restarts=usual_restarts if max_restarts is None else max_restarts,
        min_nproc=least,
        grace_s=grace_s,
        hang_limit_s=_seconds("--hang-limit", hang_limit),
        on_hang=on_hang,
        is_warm=not cold,
        incidents=incidents,
    )
    return LaunchPlan(processes, nnodes, node_rank, master_addr, master_port, rdzv_endpoint, supervision)


def read_nproc(nproc: str) -> tuple[int | Literal["auto"], int | None]:
    """Of processes: as many as possible, and the fewest, if that was said."""
    if nproc == "auto":
        return "auto", None
    least, colon, most = nproc.rpartition(":")
    if not most.isdecimal() or (colon and not least.isdecimal()):
        raise UserError(f"-n {nproc}: expected a whole number, auto, or the fewest and the most, as in 2:4")
    return int(most), int(least) if colon else None


def _seconds(option: str, text: str) -> float | None:
    if text == "off":
        return None
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{option} {text}: expected a number of seconds, or off") from None
