"""Event sinks: TensorBoard, Weights & Biases, and the terminal; the run folder is complete without them.

sinks = lockstep.loggers.open_loggers(lockstep.loggers.LogConfig(tensorboard=True), "runs/mine")
run = lockstep.Run("runs/mine", world, sinks=sinks)
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.config.job_schema import LogConfig
    from lockstep.events.event_log import Sink
    from lockstep.loggers.logger_factory import open_loggers
    from lockstep.observe.console import console_for
else:  # hidden from type checkers, so that they find misspelled names
    from lockstep.lazy_exports import lazy_exports

    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "config.job_schema": "LogConfig",
            "events.event_log": "Sink",
            "loggers.logger_factory": "open_loggers",
            "observe.console": "console_for",
        },
    )

__all__ = [
    "LogConfig",
    "Sink",
    "console_for",
    "open_loggers",
]
