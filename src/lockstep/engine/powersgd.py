"""PowerSGD: a gradient travels as the product of two thin matrices, and what that leaves out is added to the next one.

After Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization"
(2019). What is remembered belongs to parameters, and not, as in torch's own hook, to buckets, which another process
would fill in another order: so a run that resumes goes on with the numbers it would have had. And collectives begin in
one order on all ranks, on the channel's thread; torch's begin when an earlier one happens to end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep.engine.wire import AsTheyAre, Wire, computed_in
from lockstep.world.plain_values import Shard
from lockstep.world.randomness import stream
from lockstep.world.world import World


@dataclass
class _Memory:
    """What there is of one parameter."""

    number: int  # among all parameters, in the order in which they came
    passes: int = 0
    q: Tensor | None = None  # (columns, rank): where the next approximation starts from
    error: Tensor | None = None  # (rows, columns): what the last one left out, on this rank


@dataclass
class _Matrix:
    """A gradient on its way."""

    memory: _Memory
    gradient: Tensor
    content: Tensor  # (rows, columns): the gradient, and what was left out before
    start: Tensor  # the q that it starts from
    p: Tensor
    q: Tensor


@dataclass
class PowerSgd:
    world: World
    seed: int
    rank: int = 1
    start_after: int = 10  # passes
    min_compression_rate: float = 2.0
    warm_start: bool = True
    error_feedback: bool = True

    def __post_init__(self) -> None:
        self._memories: dict[Parameter, _Memory] = {}

    def add(self, parameters: Sequence[Parameter]) -> None:
        """In the same order on all ranks: they draw the same random numbers for a parameter."""
        for parameter in parameters:
            self._memories.setdefault(parameter, _Memory(len(self._memories)))

    @torch.no_grad()
    def average(self, wire: Wire, flat: Tensor, parameters: Sequence[Parameter], gradients: Sequence[Tensor]) -> None:
        plain: list[Tensor] = []
        matrices: list[_Matrix] = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            memory = self._memories[parameter]
            memory.passes += 1
            if memory.passes > self.start_after and self._is_worth_it(gradient):
                matrices.append(self._begin(memory, gradient))
            else:
                plain.append(gradient)
        if not matrices:
            wire.average(flat, AsTheyAre(flat.dtype))
            return
        for gradient, mean in zip(plain, _shared(wire, plain, [each.p for each in matrices]), strict=True):
            gradient.copy_(mean)
        for each in matrices:
            each.p, each.q = _turned(each)
        _shared(wire, [], [each.q for each in matrices])
        for each in matrices:
            self._end(each)

    def value(self, names: Mapping[Parameter, str]) -> dict[str, Any]:
        """For a checkpoint: by name, and what is each rank's own as a row of one tensor for all."""
        return {
            names[parameter]: {
                "number": memory.number,
                "passes": memory.passes,
                "q": memory.q,
                "error": None if memory.error is None else self._as_shard(memory.error),
            }
            for parameter, memory in self._memories.items()
            if parameter in names
        }

    def load(self, value: Mapping[str, Any], names: Mapping[Parameter, str]) -> None:
        owners = {name: parameter for parameter, name in names.items()}
        self._memories = {}
        for name, saved in sorted(value.items(), key=lambda item: int(item[1]["number"])):
            parameter = owners[name]
            memory = self._memories[parameter] = _Memory(len(self._memories), saved["passes"])
            memory.q = None if saved["q"] is None else saved["q"].to(parameter.device)
            if self.error_feedback and saved["error"] is not None:
                memory.error = self._own_row(saved["error"], parameter)

    def _is_worth_it(self, gradient: Tensor) -> bool:
        if gradient.dim() < 2 or not gradient.numel() or not gradient.is_floating_point():
            return False
        rows, columns = len(gradient), gradient.numel() // len(gradient)
        return (rows + columns) * min(self.rank, rows, columns) * self.min_compression_rate < gradient.numel()

    def _begin(self, memory: _Memory, gradient: Tensor) -> _Matrix:
        content = gradient.reshape(len(gradient), -1).to(computed_in(gradient.dtype))
        if memory.error is not None:
            content = content + memory.error
        start = self._start(memory, content)
        return _Matrix(memory, gradient, content, start, content @ start, start)

    def _start(self, memory: _Memory, content: Tensor) -> Tensor:
        shape = (content.shape[1], min(self.rank, *content.shape))
        if self.warm_start and memory.q is not None and memory.q.shape == shape:
            return memory.q
        return torch.randn(shape, generator=stream(self.seed, "powersgd", memory.number, memory.passes)).to(content)

    def _end(self, each: _Matrix) -> None:
        """An infinity or a NaN goes on to the gradient, where it is looked for, and is not remembered."""
        approximation = each.p @ each.q.T
        is_finite = approximation.isfinite().all()
        memory = each.memory
        if self.warm_start:
            memory.q = torch.where(is_finite, each.q, each.start)
        if self.error_feedback:
            error = torch.zeros_like(each.content) if memory.error is None else memory.error
            memory.error = torch.where(is_finite, each.content - approximation, error)
        each.gradient.copy_(approximation.view(each.gradient.shape))  # at last: the content may be a view of it

    def _as_shard(self, error: Tensor) -> Shard:
        return Shard(error.reshape(1, -1), (self.world.rank, 0), (self.world.size, error.numel()))

    def _own_row(self, rows: Tensor, parameter: Parameter) -> Tensor:
        """On another number of ranks everybody takes the mean: it is the mean that was left out of the gradients."""
        own = rows[self.world.rank] if len(rows) == self.world.size else rows.mean(0)
        return own.view(len(parameter), -1).to(parameter.device, copy=True)


def _turned(each: _Matrix) -> tuple[Tensor, Tensor]:
    """An orthonormal basis of what the ranks' products span, and this rank's matrix as seen from there."""
    p = torch.linalg.qr(each.p).Q
    return p, each.content.T @ p


def _shared(wire: Wire, plain: Sequence[Tensor], factors: Sequence[Tensor]) -> list[Tensor]:
    """The means of all these, taken together: the factors' in place, those of the others returned."""
    flat = torch.cat([each.reshape(-1).to(computed_in(each.dtype)) for each in (*plain, *factors)])
    wire.average(flat, AsTheyAre(flat.dtype))
    pieces = torch.split(flat, [each.numel() for each in (*plain, *factors)])
    for factor, piece in zip(factors, pieces[len(plain) :], strict=True):
        factor.copy_(piece.view(factor.shape))
    return [piece.view(each.shape) for each, piece in zip(plain, pieces, strict=False)]
