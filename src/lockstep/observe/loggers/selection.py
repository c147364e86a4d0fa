"""Which loggers a config asks for."""

from importlib.util import find_spec
from pathlib import Path

from lockstep.config.job import LogConfig
from lockstep.errors import UserError
from lockstep.events.event import Sink
from lockstep.observe.loggers.guarded import Guarded
from lockstep.observe.loggers.logger import Backend, Logger
from lockstep.observe.loggers.tensorboard_backend import TensorBoardBackend
from lockstep.observe.loggers.wandb_backend import WandbBackend


def check_extras(config: LogConfig) -> None:
    """Is everything installed that these loggers need? For every process, before training starts."""
    for name in _backends(config, Path()):
        spec = find_spec(name)  # the extra and the package that it brings have the same name
        if spec is None or spec.origin is None:  # without an origin it is only a folder of that name, near here
            raise UserError(f'log.{name}: needs the extra: pip install "lockstep-train[{name}]"')


def open_loggers(config: LogConfig, folder: Path) -> list[Sink]:
    """The sinks to give to the run in `folder`, on rank 0. Nothing is started or written before the run's own start."""
    check_extras(config)
    return [Guarded(Logger(backend, folder), f"log.{name}") for name, backend in _backends(config, folder).items()]


def _backends(config: LogConfig, folder: Path) -> dict[str, Backend]:
    backends: dict[str, Backend] = {}
    if config.tensorboard:
        backends["tensorboard"] = TensorBoardBackend(folder)
    if config.wandb is not None and config.wandb.mode != "disabled":
        backends["wandb"] = WandbBackend(config.wandb, folder)
    return backends
