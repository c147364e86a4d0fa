"""Config keys common to every job, training or search: device, processes, logging, seed."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field

from lockstep.config.config_file import BuiltinLookup, read_config
from lockstep.config.field_types import Flag, Frozen, Positive, PositiveInt, Whole, read_whole

_Threads = Annotated[int, Field(ge=1, le=1024), BeforeValidator(read_whole)]

# The comment at the end of a field's line is the field's description in docs/reference/settings.md.


class WandbConfig(Frozen):
    """Weights & Biases. For keys that are not set, W&B uses its own variables (WANDB_PROJECT …) and defaults."""

    project: str | None = None
    entity: str | None = None
    name: str | None = None  # by default the run folder's name
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline", "disabled"] | None = None
    init_timeout_s: Positive = 60.0  # all ranks wait while rank 0 connects: keep it below timeout_s
    finish_timeout_s: Positive = 60.0  # for the last uploads, at the end of the run
    required: Flag = False  # true: an error if W&B cannot start; false: a warning


class LogConfig(Frozen):
    """Loggers in addition to the run folder's events.jsonl, which is always written.

    Args:
        tensorboard: write event files for TensorBoard.
        wandb: settings for Weights & Biases. None: do not use it.
    """

    tensorboard: Flag = False
    wandb: WandbConfig | None = None


class JobConfig(Frozen):
    """What `lockstep train` runs: a training (`Config`) or a search (`SearchConfig`)."""

    # Keys that change no bit of the result, so a resumed run may change them. Subclasses add theirs.
    free_on_resume: ClassVar[frozenset[str]] = frozenset(
        {"ddp_backend", "log", "log_every", "nccl_debug", "timeout_s", "trace"}
    )

    recipe: str | None = None  # the recipe that `lockstep train` runs; not needed in your own loop
    seed: Whole = 0  # of everything random: the order of samples, augmentation, dropout
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: a GPU if there is one
    threads: _Threads = 1  # per process; never derived from the number of processes
    ddp_backend: Literal["auto", "nccl", "gloo"] = "auto"  # auto: nccl if each process has its own GPU
    timeout_s: Positive = 600.0  # for a collective, and for ranks to join the process group
    nccl_debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = None  # sets NCCL_DEBUG
    log_every: PositiveInt = 10  # steps
    log: LogConfig = LogConfig()  # loggers besides the run folder
    trace: Flag = False  # write digests of every step, to find where two runs diverge
    quick: Flag = False  # a smoke test: few steps, little data

    @classmethod
    def from_file(
        cls, path: str | Path, overrides: Iterable[str] = (), *, builtin: BuiltinLookup | None = None
    ) -> Self:
        """Read and validate a YAML file.

        Args:
            path: the file.
            overrides: `key=value` texts with dotted keys, as on the command line.
            builtin: finds the file of a built-in config that `base:` names.

        Raises:
            ConfigError: lists everything that is wrong, one line each.
        """
        return read_config(path, overrides, builtin=builtin).check(cls)
