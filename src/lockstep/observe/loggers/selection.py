"""Which loggers a config asks for."""

from importlib.util import find_spec
from pathlib import Path

from lockstep.config.schema import LogConfig
from lockstep.errors import UserError
from lockstep.events.event import Sink
from lockstep.observe.loggers.guarded import Guarded
from lockstep.observe.loggers.logger import Backend, Logger
from lockstep.observe.loggers.tensorboard_backend import TensorBoardBackend
from lockstep.observe.loggers.wandb_backend import WandbBackend


def open_loggers(config: LogConfig, folder: Path) -> list[Sink]:
    """The sinks to give to the run in `folder`, on rank 0. Nothing is started or written before the run's own start."""
    backends: dict[str, Backend] = {}
    if config.tensorboard:
        _require("tensorboard")
        backends["tensorboard"] = TensorBoardBackend(folder)
    if config.wandb is not None and config.wandb.mode != "disabled":
        _require("wandb")
        backends["wandb"] = WandbBackend(config.wandb, folder)
    return [Guarded(Logger(backend, folder), f"log.{name}") for name, backend in backends.items()]


def _require(name: str) -> None:
    """The extra and the package that it brings have the same name."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:  # without an origin it is a folder of that name that lies about here
        raise UserError(f'log.{name}: needs the extra: pip install "lockstep-train[{name}]"')
