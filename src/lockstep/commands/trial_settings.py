"""What a config must be, and what is laid over it, where runs of it are to be compared bit by bit."""

from typing import TYPE_CHECKING

from lockstep.errors import UserError

if TYPE_CHECKING:  # pydantic takes a while
    from lockstep.config.job import JobConfig

# What changes no bit and would stand in the way: loggers of other people's services, …
_ALWAYS = ("trace=true", "log.tensorboard=false", "log.wandb=null")
# … one machine's share of lanes, …
_OF_TRAINING = ("lanes_per_rank=null",)
# … and an end that the clock decides.
_OF_A_SEARCH = ("max_runtime_hours=null",)


def check_settings(config: "JobConfig", processes: int = 1) -> None:
    """Refuse what is not the same work on any number of processes, and more processes than there is work for."""
    from lockstep.config.schema import Config
    from lockstep.data.lanes import choose_lanes, share_lanes

    if not isinstance(config, Config):  # a search keeps its promise on any number of processes
        return
    if config.determinism != "lockstep":
        raise UserError(f"determinism={config.determinism} promises no bits: add determinism=lockstep")
    if config.batch.per_device is not None:
        raise UserError(
            f"batch.per_device={config.batch.per_device} means another batch on another number of processes: "
            "add batch.global=…"
        )
    assert config.batch.global_batch is not None
    share_lanes(choose_lanes(config.batch.global_batch) if config.lanes == "auto" else config.lanes, processes)


def trial_overrides(config: "JobConfig", steps: int | None = None) -> list[str]:
    """`steps`: so many, or generations; else as many as the config says."""
    from lockstep.config.schema import Config

    if isinstance(config, Config):
        length = [] if steps is None else ["epochs=null", f"steps={steps}"]
        return [*_ALWAYS, *_OF_TRAINING, *length]
    length = [] if steps is None else [f"max_generations={steps}", "early_stopping=null"]
    return [*_ALWAYS, *_OF_A_SEARCH, *length]


def has_data_workers(config: "JobConfig") -> bool:
    from lockstep.config.schema import Config

    return isinstance(config, Config) and config.workers > 0
