"""Gradient compression for fast mode: its settings, and the DDP communication hook that applies it."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Protocol, Self, cast, get_args

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn import Parameter

from lockstep.config.argument_checks import require_count, require_flag, require_known, require_positive
from lockstep.config.duration import Duration, RunLength
from lockstep.engine.comm_thread import CommThread
from lockstep.engine.compressed_all_reduce import CompressedAllReduce, ScaledHalf, Uncompressed
from lockstep.engine.gradient_math import scale_gradients
from lockstep.engine.powersgd import PowerSgd
from lockstep.errors import UserError
from lockstep.world.world import World

Kind = Literal["none", "fp16", "bf16", "powersgd"]
Correction = Callable[[], Tensor]
"""Returns what gradients must be multiplied by to be those of the mean loss. May wait for the other ranks' counts."""

_START_AFTER = Duration.parse("10 steps")


@dataclass(frozen=True)
class Compression:
    """How gradients are sent. All settings but `kind` are PowerSGD's.

    Args:
        kind: "none", "fp16", "bf16" or "powersgd".
        rank: the rank of the low-rank approximation.
        start_after: how long gradients are sent uncompressed at first.
        min_compression_rate: a gradient that would not shrink by this factor is sent uncompressed.
        warm_start: start from the previous approximation.
        error_feedback: add the error of each approximation to the next gradient.
    """

    kind: Kind = "none"
    rank: int = 1
    start_after: Duration | str | int = _START_AFTER  # becomes a Duration
    min_compression_rate: float = 2.0
    warm_start: bool = True
    error_feedback: bool = True

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise UserError(f"compression={self.kind!r}: expected one of {', '.join(get_args(Kind))}")
        require_count("compression: rank", self.rank)
        require_positive("compression: min_compression_rate", self.min_compression_rate)
        require_flag("compression: warm_start", self.warm_start)
        require_flag("compression: error_feedback", self.error_feedback)
        try:
            object.__setattr__(self, "start_after", Duration.parse(self.start_after))
        except ValueError as error:
            raise UserError(f"compression: start_after: {error}") from None
        if self.kind != "powersgd":
            self._reject_unused_settings()

    @classmethod
    def read(cls, given: Any) -> Self:
        """Return the settings given by a kind's name, or by a mapping with a kind and its settings."""
        if isinstance(given, cls):
            return given
        if isinstance(given, str):
            return cls(cast(Kind, given))  # checked in __post_init__
        if not isinstance(given, Mapping):
            raise UserError(f"compression={given!r}: expected a name, or a mapping with a kind and its settings")
        require_known("compression has no setting", given, [each.name for each in fields(cls)])
        return cls(**given)

    def _reject_unused_settings(self) -> None:
        """Raise if a setting would be ignored. Default values are allowed: a config fills them in."""
        for each in fields(self):
            if each.name != "kind" and getattr(self, each.name) != each.default:
                raise UserError(
                    f"compression: {each.name} is for powersgd only, but kind={self.kind}: set kind=powersgd, "
                    f"or omit {each.name}"
                )

    @property
    def is_stateful(self) -> bool:
        """Whether what is sent depends on what was sent before."""
        return self.kind == "powersgd" and (self.warm_start or self.error_feedback)

    def plain(self) -> Any:
        """Return the settings in the form in which they are given: the inverse of `read`."""
        if self.kind != "powersgd":
            return self.kind
        return asdict(self) | {"start_after": str(self.start_after)}


class CompressionMethod(Protocol):
    """Averages gradients over all ranks with fewer bytes."""

    def add(self, parameters: Sequence[Parameter]) -> None:
        """Prepare for gradients of these parameters."""
        ...

    def average(
        self,
        all_reduce: CompressedAllReduce,
        flat: Tensor,
        parameters: Sequence[Parameter],
        gradients: Sequence[Tensor],
    ) -> None:
        """Replace a flat bucket by its mean over all ranks. `gradients`: those of the parameters, as views of it."""
        ...

    def state_dict(self, names: Mapping[Parameter, str]) -> dict[str, Any]:
        """Return what a checkpoint must hold, by the parameters' names."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], names: Mapping[Parameter, str]) -> None:
        """Continue from a checkpoint."""
        ...


@dataclass(frozen=True)
class HalfPrecision:
    """Sends gradients in a dtype of two bytes."""

    dtype: torch.dtype

    def add(self, parameters: Sequence[Parameter]) -> None:
        pass

    def average(
        self,
        all_reduce: CompressedAllReduce,
        flat: Tensor,
        parameters: Sequence[Parameter],  # noqa: ARG002
        gradients: Sequence[Tensor],  # noqa: ARG002
    ) -> None:
        shrinks = flat.is_floating_point() and flat.element_size() > self.dtype.itemsize
        all_reduce.average(flat, ScaledHalf(self.dtype) if shrinks else Uncompressed(flat.dtype))

    def state_dict(self, names: Mapping[Parameter, str]) -> dict[str, Any]:  # noqa: ARG002
        return {}

    def load_state_dict(self, state: Mapping[str, Any], names: Mapping[Parameter, str]) -> None:
        pass


@dataclass
class Traffic:
    """How many bytes of gradients this rank has sent, and would have sent uncompressed."""

    steps: int = 0
    sent: int = 0
    uncompressed: int = 0

    def per_step(self) -> dict[str, int]:
        """Return the bytes sent in a step, for the run's events."""
        steps = max(self.steps, 1)
        return {"gradient_bytes": self.sent // steps, "uncompressed_bytes": self.uncompressed // steps}


class Compressor:
    """The communication hook of DistributedDataParallel. There is one for each run: its state outlives engines."""

    def __init__(self, settings: Compression, world: World, *, seed: int) -> None:
        self.traffic = Traffic()
        self._settings = settings
        self._world = world
        self._method = _make_method(settings, world, seed)
        self._comm: CommThread | None = None

    def open(self, length: RunLength) -> None:
        """Start the communication thread, on all ranks together. `length`: converts durations to steps."""
        if isinstance(self._method, PowerSgd):
            start_after = Duration.parse(self._settings.start_after)
            self._method.start_after = start_after.in_steps(length, "compression.start_after")
        self._failure: BaseException | None = None
        self._comm = CommThread(self._world)
        self._all_reduce = CompressedAllReduce(self._comm, self._world)

    def close(self, *, abandon: bool) -> None:
        """End the communication thread. `abandon`: do not wait for other ranks."""
        if self._comm is not None:
            self._comm.close(abandon=abandon)
            self._comm = None

    def add(self, parameters: Sequence[Parameter]) -> None:
        """Prepare for gradients of these parameters."""
        self._method.add(parameters)

    def average(self, bucket: GradBucket, correction: Correction | None) -> torch.futures.Future[Tensor]:
        """Average a bucket over all ranks while the backward pass continues. `correction`: applied before."""
        assert self._comm is not None
        flat = bucket.buffer()
        averaged: torch.futures.Future[Tensor] = torch.futures.Future(devices=[flat.device] if flat.is_cuda else [])
        job = self._comm.submit(self._average, flat, bucket.parameters(), bucket.gradients(), correction, averaged)

        def keep_failure(future: Future[Any]) -> None:  # after a failed job, all later ones fail with its error
            # DistributedDataParallel would mistake an exception for a tensor, and report that instead.
            if (failure := future.exception()) is not None:
                self._failure = failure
                averaged.set_result(flat)

        job.future.add_done_callback(keep_failure)
        return averaged

    def check(self) -> None:
        """Raise the failure of a bucket, if any. Call it after a backward pass, which has waited for its buckets."""
        if self._failure is not None:
            raise self._failure

    def state_dict(self, names: Mapping[Parameter, str]) -> dict[str, Any] | None:
        """Return what a checkpoint must hold, by the parameters' names; None if the method has no state."""
        return self._method.state_dict(names) if self._settings.is_stateful else None

    def load_state_dict(self, state: Mapping[str, Any], names: Mapping[Parameter, str]) -> None:
        """Continue from a checkpoint."""
        self._method.load_state_dict(state, names)

    @torch.no_grad()
    def _average(
        self,
        flat: Tensor,
        parameters: Sequence[Parameter],
        gradients: Sequence[Tensor],
        correction: Correction | None,
        averaged: torch.futures.Future[Tensor],
    ) -> None:
        if correction is not None:
            factor = correction()
            if not factor.is_cpu or factor != 1.0:
                scale_gradients([flat], factor)
        sent_before = self._all_reduce.comm.bytes_sent
        self._method.average(self._all_reduce, flat, parameters, gradients)
        self.traffic.sent += self._all_reduce.comm.bytes_sent - sent_before
        self.traffic.uncompressed += self._all_reduce.uncompressed_bytes(flat)
        averaged.set_result(flat)  # on the stream that computes it: whoever waits for the future waits for that stream


def _make_method(settings: Compression, world: World, seed: int) -> CompressionMethod:
    if settings.kind == "powersgd":
        return PowerSgd(
            world,
            seed,
            rank=settings.rank,
            min_compression_rate=settings.min_compression_rate,
            warm_start=settings.warm_start,
            error_feedback=settings.error_feedback,
        )
    return HalfPrecision({"fp16": torch.float16, "bf16": torch.bfloat16}[settings.kind])
