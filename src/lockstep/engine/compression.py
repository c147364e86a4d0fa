"""Gradients in fewer bytes, in fast mode: DistributedDataParallel hands over its buckets, and gets back their means."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Protocol, Self, cast, get_args

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn import Parameter

from lockstep.config.arguments import require_count, require_flag, require_known, require_positive
from lockstep.config.duration import Duration, RunLength
from lockstep.engine.channel import Channel
from lockstep.engine.powersgd import PowerSgd
from lockstep.engine.scaling import scale_gradients
from lockstep.engine.wire import AsTheyAre, Halves, Wire
from lockstep.errors import UserError
from lockstep.world.world import World

Kind = Literal["none", "fp16", "bf16", "powersgd"]
Correction = Callable[[], Tensor]
"""What gradients must be multiplied with to be those of the mean loss; it may wait for the other ranks' counts."""

_START_AFTER = Duration.parse("10 steps")


@dataclass(frozen=True)
class Compression:
    """How gradients travel. All but `kind` is PowerSGD's.

    `rank`: of the approximation. The first `start_after` steps go uncompressed, and always what would not shrink by
    `min_compression_rate`. `warm_start` goes on from the last approximation, `error_feedback` makes up for what it left
    out.
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
            self._refuse_settings()

    @classmethod
    def read(cls, given: Any) -> Self:
        """From a kind's name, or a mapping with its settings."""
        if isinstance(given, cls):
            return given
        if isinstance(given, str):
            return cls(cast(Kind, given))  # it is looked at there
        if not isinstance(given, Mapping):
            raise UserError(f"compression={given!r}: expected a name, or a mapping with a kind and its settings")
        require_known("compression has no setting", given, [each.name for each in fields(cls)])
        return cls(**given)

    def _refuse_settings(self) -> None:
        """Those that would be ignored; what is as it would be anyway may have been filled in by a config."""
        for each in fields(self):
            if each.name != "kind" and getattr(self, each.name) != each.default:
                raise UserError(
                    f"compression: {each.name} is powersgd's, and kind={self.kind}: set kind=powersgd, "
                    f"or leave {each.name} away"
                )

    @property
    def remembers(self) -> bool:
        """Does what is sent depend on what was sent before?"""
        return self.kind == "powersgd" and (self.warm_start or self.error_feedback)

    def plain(self) -> Any:
        """As it was given, or would be."""
        if self.kind != "powersgd":
            return self.kind
        return asdict(self) | {"start_after": str(self.start_after)}


class Method(Protocol):
    def add(self, parameters: Sequence[Parameter]) -> None:
        """Gradients of these are to come."""
        ...

    def average(self, wire: Wire, flat: Tensor, parameters: Sequence[Parameter], gradients: Sequence[Tensor]) -> None:
        """The mean over all ranks of a bucket, in place. `gradients`: the parameters', as views of it."""
        ...

    def value(self, names: Mapping[Parameter, str]) -> dict[str, Any]:
        """What a checkpoint must hold of it."""
        ...

    def load(self, value: Mapping[str, Any], names: Mapping[Parameter, str]) -> None: ...


@dataclass(frozen=True)
class HalfPrecision:
    dtype: torch.dtype

    def add(self, parameters: Sequence[Parameter]) -> None:
        pass

    def average(self, wire: Wire, flat: Tensor, parameters: Sequence[Parameter], gradients: Sequence[Tensor]) -> None:  # noqa: ARG002
        shrinks = flat.is_floating_point() and flat.element_size() > self.dtype.itemsize
        wire.average(flat, Halves(self.dtype) if shrinks else AsTheyAre(flat.dtype))

    def value(self, names: Mapping[Parameter, str]) -> dict[str, Any]:  # noqa: ARG002
        return {}

    def load(self, value: Mapping[str, Any], names: Mapping[Parameter, str]) -> None:
        pass


@dataclass
class Traffic:
    """What this rank has sent of its gradients, and would have sent of them uncompressed."""

    steps: int = 0
    sent: int = 0
    uncompressed: int = 0

    def per_step(self) -> dict[str, int]:
        """Bytes; for the run's events."""
        steps = max(self.steps, 1)
        return {"gradient_bytes": self.sent // steps, "uncompressed_bytes": self.uncompressed // steps}


class Compressor:
    """One for a run: engines come and go, and what a method remembers stays."""

    def __init__(self, settings: Compression, world: World, *, seed: int) -> None:
        self.traffic = Traffic()
        self._settings = settings
        self._world = world
        self._method = _method(settings, world, seed)
        self._channel: Channel | None = None

    def open(self, length: RunLength) -> None:
        """All ranks together. `length`: what durations are counted in."""
        if isinstance(self._method, PowerSgd):
            start_after = Duration.parse(self._settings.start_after)
            self._method.start_after = start_after.in_steps(length, "compression.start_after")
        self._failure: BaseException | None = None
        self._channel = Channel(self._world)
        self._wire = Wire(self._channel, self._world)

    def close(self, *, abandon: bool) -> None:
        if self._channel is not None:
            self._channel.close(abandon=abandon)
            self._channel = None

    def add(self, parameters: Sequence[Parameter]) -> None:
        self._method.add(parameters)

    def share(self, bucket: GradBucket, correction: Correction | None) -> torch.futures.Future[Tensor]:
        """A bucket's mean over all ranks, while the backward pass goes on."""
        assert self._channel is not None
        flat = bucket.buffer()
        answer: torch.futures.Future[Tensor] = torch.futures.Future(devices=[flat.device] if flat.is_cuda else [])
        job = self._channel.submit(self._share, flat, bucket.parameters(), bucket.gradients(), correction, answer)

        def pass_failure_on(future: Future[Any]) -> None:  # also that of an earlier job, after which none is begun
            # DistributedDataParallel would take an exception for a tensor, and complain of that.
            if (failure := future.exception()) is not None:
                self._failure = failure
                answer.set_result(flat)

        job.future.add_done_callback(pass_failure_on)
        return answer

    def check(self) -> None:
        """After a backward pass, which has waited for all of its buckets: raise what has kept one from being shared."""
        if self._failure is not None:
            raise self._failure

    def value(self, names: Mapping[Parameter, str]) -> dict[str, Any] | None:
        """What a checkpoint must hold; None where nothing is remembered."""
        return self._method.value(names) if self._settings.remembers else None

    def load(self, value: Mapping[str, Any], names: Mapping[Parameter, str]) -> None:
        self._method.load(value, names)

    @torch.no_grad()
    def _share(
        self,
        flat: Tensor,
        parameters: Sequence[Parameter],
        gradients: Sequence[Tensor],
        correction: Correction | None,
        answer: torch.futures.Future[Tensor],
    ) -> None:
        if correction is not None:
            factor = correction()
            if not factor.is_cpu or factor != 1.0:
                scale_gradients([flat], factor)
        sent_before = self._wire.channel.bytes_sent
        self._method.average(self._wire, flat, parameters, gradients)
        self.traffic.sent += self._wire.channel.bytes_sent - sent_before
        self.traffic.uncompressed += self._wire.bytes_as_they_are(flat)
        answer.set_result(flat)  # in the stream it was made in, which whoever waits for it then waits for


def _method(settings: Compression, world: World, seed: int) -> Method:
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
