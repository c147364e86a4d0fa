"""The command that a job is to run, understood and checked before it waits in a queue."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from lockstep.commands.launching import check_launch_options
from lockstep.errors import EXIT_STOPPED, UserError

if TYPE_CHECKING:
    from lockstep.config.job import JobConfig

# By their names in `launching.py`.
_DECIDED_BY_THE_SCHEDULER = ("nnodes", "node_rank", "master_addr", "master_port", "rdzv_endpoint")


class Submitted(NamedTuple):
    words: tuple[str, ...]
    title: str  # what it trains: the name of a recipe, of a config's or a script's file
    grace_s: float | None  # where it says so


def understand(context: typer.Context, words: Sequence[str], nproc: str, num_processes: int) -> Submitted:
    """Check a `train …` or a `run …` as if it were to start now, with so many processes here and on all machines."""
    if not words or words[0] not in ("train", "run"):
        told = f"{words[0][:60]!r}" if words else "nothing"
        raise UserError(
            f"expected the command to run, train … or run …, and got {told}: lockstep submit … -- train mine.yaml"
        )
    line = _parsed(context, words)
    given = {name: line.params[name] for name in line.params if _is_given(line, name)}
    _refuse(given)
    check_launch_options(nproc, line.params)
    if words[0] == "train":
        _check_training(given, num_processes)
        subject = given["config"]
    else:
        _check_script(given)
        subject = given["script"]
    return Submitted(tuple(words), Path(subject).stem, given.get("grace_s"))


def _parsed(context: typer.Context, words: Sequence[str]) -> Any:
    """The line as the command itself reads it; or its own complaint."""
    root = context.find_root()
    group: Any = root.command
    name, *arguments = words
    return group.commands[name].make_context(name, arguments, parent=root)


def _is_given(line: Any, name: str) -> bool:
    return bool(line.get_parameter_source(name).name == "COMMANDLINE")


def _refuse(given: dict[str, Any]) -> None:
    if "nproc" in given:
        raise UserError(
            f"-n {given['nproc']} stands after the command: say it before, lockstep submit … -n {given['nproc']} -- …"
        )
    for name in _DECIDED_BY_THE_SCHEDULER:
        if name in given:
            option = "--" + name.replace("_", "-")
            raise UserError(
                f"{option} {given[name]}: which machines meet where is the scheduler's to say; leave it away"
            )
    if "stop_after" in given:
        raise UserError(
            f"--stop-after {given['stop_after']} ends with code {EXIT_STOPPED}, and such a job is started again, "
            "and again: set steps=… instead"
        )


def _check_training(given: dict[str, Any], processes: int) -> None:
    """As `lockstep train` does, and that the processes have something to do."""
    from lockstep.observe.loggers.selection import check_extras
    from lockstep.recipes.registry import load_recipe

    changes = [*(given.get("overrides") or []), *(["quick=true"] if given.get("quick") else [])]
    _, settings = load_recipe(given["config"], changes)
    check_extras(settings.log)
    _check_lanes(settings, processes)


def _check_lanes(settings: "JobConfig", processes: int) -> None:
    from lockstep.config.schema import Config
    from lockstep.data.lanes import choose_lanes, share_lanes

    # A batch per device has as many lanes as it needs; a mesh shares lanes out over one of its axes.
    if isinstance(settings, Config) and settings.batch.global_batch is not None and isinstance(settings.parallel, str):
        lanes = choose_lanes(settings.batch.global_batch) if settings.lanes == "auto" else settings.lanes
        share_lanes(lanes, processes, settings.lanes_per_rank)


def _check_script(given: dict[str, Any]) -> None:
    from lockstep.launcher.start import check_target

    check_target([*(["-m"] if given.get("module") else []), given["script"]])
