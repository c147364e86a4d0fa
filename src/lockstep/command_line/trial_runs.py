"""The trial runs that commands start and compare: checks of their config, the overrides for it, and how to run them."""

import subprocess
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from lockstep.config import environment
from lockstep.errors import UserError

if TYPE_CHECKING:  # importing pydantic takes a while
    from lockstep.config.job_schema import JobConfig

# Overrides that do not affect the result: no loggers, which may call other services, …
_OVERRIDES = ("trace=true", "log.tensorboard=false", "log.wandb=null")
# … no assignment of lanes that is meant for one machine, …
_TRAINING_OVERRIDES = ("lanes_per_rank=null",)
# … and no end that depends on the clock.
_SEARCH_OVERRIDES = ("max_runtime_hours=null",)

_STOP_GRACE_S = 10.0


def require_no_launcher(command: str) -> None:
    """Raise a `UserError` if a launcher started this process, for a command that starts its own processes."""
    if environment.read_role(nproc_given=False) == "worker":
        raise UserError(f"lockstep {command} starts its own processes: run it once, without a launcher")


def leave_hand_set_job(command: str) -> None:
    """As `require_no_launcher`, but let the first process of a job that was set up by hand run the command.

    Containers and notebooks set RANK and WORLD_SIZE for whatever runs in them, and a trial on one process would wait
    for the others: the processes that this one starts do not get these variables.
    """
    if environment.is_launched() or environment.hand_set_rank() != 0:
        require_no_launcher(command)
    environment.forget_hand_set_job()


def check_trial_config(config: "JobConfig", processes: int = 1) -> None:
    """Refuse a config whose result depends on the number of processes, or more processes than it has lanes."""
    from lockstep.config.train_schema import Config
    from lockstep.data.lanes import choose_lanes, share_lanes

    if not isinstance(config, Config):  # a search gives the same result on any number of processes
        return
    if config.determinism != "lockstep":
        raise UserError(f"determinism={config.determinism} does not promise equal bits: add determinism=lockstep")
    if config.batch.per_device is not None:
        raise UserError(
            f"batch.per_device={config.batch.per_device}: the batch would depend on the number of processes; "
            "add batch.global=…"
        )
    assert config.batch.global_batch is not None
    share_lanes(choose_lanes(config.batch.global_batch) if config.lanes == "auto" else config.lanes, processes)


def trial_overrides(config: "JobConfig", steps: int | None = None) -> list[str]:
    """Return the overrides for a trial run of this config; `steps` limits its steps, or a search's generations."""
    from lockstep.config.train_schema import Config

    if isinstance(config, Config):
        length = [] if steps is None else ["epochs=null", f"steps={steps}"]
        return [*_OVERRIDES, *_TRAINING_OVERRIDES, *length]
    length = [] if steps is None else [f"max_generations={steps}", "early_stopping=null"]
    return [*_OVERRIDES, *_SEARCH_OVERRIDES, *length]


def has_data_workers(config: "JobConfig") -> bool:
    """Do runs of this config load data in worker processes?"""
    from lockstep.config.train_schema import Config

    return isinstance(config, Config) and config.workers > 0


def run_to_end(
    command: Sequence[str],
    variables: Mapping[str, str],
    output: int | IO[Any] | None,
    errors: int | IO[Any] | None = subprocess.STDOUT,
) -> int:
    """Run a command and return its exit code. If this process is stopped meanwhile, so is the command.

    Args:
        command: the program and its arguments.
        variables: environment variables to set besides this process's own.
        output: where its standard output goes, as `subprocess` takes it.
        errors: where its standard error goes; by default, to `output`.
    """
    process = start_command(command, environment.all_variables() | dict(variables), output, errors)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        try:
            process.wait(_STOP_GRACE_S)
        finally:
            process.kill()
            process.wait()
        raise


def start_command(
    command: Sequence[str], variables: Mapping[str, str], output: int | IO[Any] | None, errors: int | IO[Any] | None
) -> "subprocess.Popen[bytes]":
    """Start a command with exactly these environment variables and no input."""
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=dict(variables))
