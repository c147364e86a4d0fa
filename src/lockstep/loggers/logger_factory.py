"""Build the loggers that a config asks for."""

from importlib.util import find_spec
from pathlib import Path

from lockstep.config.job_schema import LogConfig
from lockstep.errors import UserError
from lockstep.events.event_log import Sink
from lockstep.events.guarded_sink import GuardedSink
from lockstep.loggers.logger_sink import LoggerBackend, LoggerSink
from lockstep.loggers.tensorboard_backend import TensorBoardBackend
from lockstep.loggers.wandb_backend import WandbBackend


def check_extras(config: LogConfig) -> None:
    """Raise a UserError if a package that these loggers need is not installed. Call it before training starts."""
    for name in _backends(config, Path()):
        spec = find_spec(name)  # each extra has the name of the package that it installs
        if spec is None or spec.origin is None:  # no origin: it is only a folder of that name on the path
            raise UserError(f'log.{name} needs an extra: pip install "lockstep-train[{name}]"')


def open_loggers(config: LogConfig, folder: str | Path) -> list[Sink]:
    """Open loggers for `Run(folder, sinks=…)`.

    Args:
        config: the loggers to open, as in a config's `log` section: `LogConfig(tensorboard=True)`.
        folder: the run folder.

    Returns the sinks. They start and write nothing before the run's start event.
    """
    check_extras(config)
    folder = Path(folder)
    backends = _backends(config, folder)
    return [GuardedSink(LoggerSink(backend, folder), f"log.{name}") for name, backend in backends.items()]


def _backends(config: LogConfig, folder: Path) -> dict[str, LoggerBackend]:
    backends: dict[str, LoggerBackend] = {}
    if config.tensorboard:
        backends["tensorboard"] = TensorBoardBackend(folder)
    if config.wandb is not None and config.wandb.mode != "disabled":
        backends["wandb"] = WandbBackend(config.wandb, folder)
    return backends
