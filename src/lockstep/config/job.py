"""What every run has in its config, whatever it computes: where it runs, and what is written down."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from lockstep.config.draft import Builtin, read
from lockstep.config.fields import Count, Flag, Frozen, Positive, Whole


class WandbConfig(Frozen):
    """Weights & Biases. What is not said here is W&B's to decide: its own variables (WANDB_PROJECT …), its defaults."""

    project: str | None = None
    entity: str | None = None
    name: str | None = None  # the run folder's, unless said
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline", "disabled"] | None = None
    init_timeout_s: Positive = 60.0  # all ranks wait while rank 0 joins: stay below timeout_s
    finish_timeout_s: Positive = 60.0  # for sending the rest at the end
    required: Flag = False  # an error if W&B cannot start; else a warning


class LogConfig(Frozen):
    """Loggers beside the run folder's own events.jsonl, which is always written."""

    tensorboard: Flag = False
    wandb: WandbConfig | None = None


class JobConfig(Frozen):
    """A run of `lockstep train`: of training (`Config`), or of a search (`SearchConfig`)."""

    # Those that change no bit: a run may go on with others than it had. A subclass names more.
    free_on_resume: ClassVar[frozenset[str]] = frozenset(
        {"ddp_backend", "log", "log_every", "nccl_debug", "timeout_s", "trace"}
    )

    recipe: str | None = None  # what `lockstep train` is to carry out; a loop of one's own needs none
    seed: Whole = 0
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    threads: Annotated[Count, Field(le=1024)] = 1  # per process; never derived from the number of processes
    ddp_backend: Literal["auto", "nccl", "gloo"] = "auto"
    timeout_s: Positive = 600.0
    nccl_debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = None  # what NCCL says; else as NCCL_DEBUG has it
    log_every: Count = 10  # steps
    log: LogConfig = LogConfig()
    trace: Flag = False  # write every step's digests down, to see where two runs part
    quick: Flag = False  # a smoke run: few steps, little data

    @classmethod
    def from_file(cls, path: str | Path, overrides: Iterable[str] = (), *, builtin: Builtin | None = None) -> Self:
        """The config in a YAML file with `key=value` overrides; all that is wrong with it in one ConfigError."""
        return read(path, overrides, builtin=builtin).check(cls)
