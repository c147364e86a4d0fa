"""TensorBoard and Weights & Biases as event sinks; the run folder is complete without them.

sinks = lockstep.loggers.open_loggers(lockstep.loggers.LogConfig(tensorboard=True), "runs/mine")
run = lockstep.Run("runs/mine", world, sinks=sinks)
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.config.job_schema import LogConfig
    from lockstep.events.event_log import Sink
    from lockstep.loggers.logger_factory import open_loggers
else:  # hidden from type checkers, so that they find misspelled names
    from lockstep.lazy_exports import lazy_exports

    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "config.job_schema": "LogConfig",
            "events.event_log": "Sink",
            "loggers.logger_factory": "open_loggers",
        },
    )

__all__ = [
    "LogConfig",
    "Sink",
    "open_loggers",
]
