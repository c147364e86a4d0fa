"""PowerSGD compression: a gradient is sent as two thin matrices; the error is added to the next one.

After Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization"
(2019). Unlike torch's own hook, this one keeps its state by parameter and not by bucket: a resumed run, which may fill
its buckets differently, continues with the same numbers. And its collectives start in the same order on all ranks, on
the communication thread, and not whenever an earlier one happens to end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep.engine.compressed_all_reduce import CompressedAllReduce, Uncompressed
from lockstep.engine.gradient_math import accumulation_dtype
from lockstep.world.keyed_random import keyed_generator
from lockstep.world.serialization import Shard
from lockstep.world.world import World


@dataclass
class _ParameterState:
    """What is kept for one parameter from step to step."""

    number: int  # among all parameters, in the order in which they were added
    passes: int = 0
    q: Tensor | None = None  # (columns, rank): the start of the next approximation
    error: Tensor | None = None  # (rows, columns): what the last approximation left out, on this rank


@dataclass
class _LowRankGradient:
    """A gradient while it is being compressed and averaged: matrix ≈ p qᵀ."""

    state: _ParameterState
    gradient: Tensor
    matrix: Tensor  # (rows, columns): the gradient plus the last error
    start: Tensor  # the q to start from
    p: Tensor
    q: Tensor


@dataclass
class PowerSgd:
    """Averages gradients by low-rank approximation; see `Compression` for the settings."""

    world: World
    seed: int
    rank: int = 1
    start_after: int = 10  # passes
    min_compression_rate: float = 2.0
    warm_start: bool = True
    error_feedback: bool = True

    def __post_init__(self) -> None:
        self._states: dict[Parameter, _ParameterState] = {}

    def add(self, parameters: Sequence[Parameter]) -> None:
        """Add parameters, in the same order on all ranks, which then draw the same random numbers for each."""
        for parameter in parameters:
            self._states.setdefault(parameter, _ParameterState(len(self._states)))

    @torch.no_grad()
    def average(
        self,
        all_reduce: CompressedAllReduce,
        flat: Tensor,
        parameters: Sequence[Parameter],
        gradients: Sequence[Tensor],
    ) -> None:
        """Replace a flat bucket by its approximate mean over all ranks."""
        plain: list[Tensor] = []
        matrices: list[_LowRankGradient] = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            state = self._states[parameter]
            state.passes += 1
            if state.passes > self.start_after and self._is_compressible(gradient):
                matrices.append(self._begin(state, gradient))
            else:
                plain.append(gradient)
        if not matrices:
            all_reduce.average(flat, Uncompressed(flat.dtype))
            return
        means = _average_together(all_reduce, plain, [each.p for each in matrices])
        for gradient, mean in zip(plain, means, strict=True):
            gradient.copy_(mean)
        for each in matrices:
            each.p, each.q = _orthogonalize(each)
        _average_together(all_reduce, [], [each.q for each in matrices])
        for each in matrices:
            self._end(each)

    def state_dict(self, names: Mapping[Parameter, str]) -> dict[str, Any]:
        """Return the state by parameter name. Each rank's error becomes a row of one tensor."""
        return {
            names[parameter]: {
                "number": state.number,
                "passes": state.passes,
                "q": state.q,
                "error": None if state.error is None else self._as_shard(state.error),
            }
            for parameter, state in self._states.items()
            if parameter in names
        }

    def load_state_dict(self, state: Mapping[str, Any], names: Mapping[Parameter, str]) -> None:
        """Continue from a checkpoint, which another number of ranks may have saved."""
        parameters = {name: parameter for parameter, name in names.items()}
        self._states = {}
        for name, saved in sorted(state.items(), key=lambda item: int(item[1]["number"])):
            parameter = parameters[name]
            restored = self._states[parameter] = _ParameterState(len(self._states), saved["passes"])
            restored.q = None if saved["q"] is None else saved["q"].to(parameter.device)
            if self.error_feedback and saved["error"] is not None:
                restored.error = self._own_row(saved["error"], parameter)

    def _is_compressible(self, gradient: Tensor) -> bool:
        if gradient.dim() < 2 or not gradient.numel() or not gradient.is_floating_point():
            return False
        rows, columns = len(gradient), gradient.numel() // len(gradient)
        return (rows + columns) * min(self.rank, rows, columns) * self.min_compression_rate < gradient.numel()

    def _begin(self, state: _ParameterState, gradient: Tensor) -> _LowRankGradient:
        matrix = gradient.reshape(len(gradient), -1).to(accumulation_dtype(gradient.dtype))
        if state.error is not None:
            matrix = matrix + state.error
        start = self._start(state, matrix)
        return _LowRankGradient(state, gradient, matrix, start, matrix @ start, start)

    def _start(self, state: _ParameterState, matrix: Tensor) -> Tensor:
        shape = (matrix.shape[1], min(self.rank, *matrix.shape))
        if self.warm_start and state.q is not None and state.q.shape == shape:
            return state.q
        generator = keyed_generator(self.seed, "powersgd", state.number, state.passes)
        return torch.randn(shape, generator=generator).to(matrix)

    def _end(self, low_rank: _LowRankGradient) -> None:
        """Write the approximation into the gradient. Infinities and NaNs go there, too, but not into the state."""
        approximation = low_rank.p @ low_rank.q.T
        is_finite = approximation.isfinite().all()
        state = low_rank.state
        if self.warm_start:
            state.q = torch.where(is_finite, low_rank.q, low_rank.start)
        if self.error_feedback:
            error = torch.zeros_like(low_rank.matrix) if state.error is None else state.error
            state.error = torch.where(is_finite, low_rank.matrix - approximation, error)
        low_rank.gradient.copy_(approximation.view(low_rank.gradient.shape))  # last: the matrix may be a view of it

    def _as_shard(self, error: Tensor) -> Shard:
        return Shard(error.reshape(1, -1), (self.world.rank, 0), (self.world.size, error.numel()))

    def _own_row(self, rows: Tensor, parameter: Parameter) -> Tensor:
        """Return this rank's error; the mean if the number of ranks has changed, as gradients are averaged, too."""
        own = rows[self.world.rank] if len(rows) == self.world.size else rows.mean(0)
        return own.view(len(parameter), -1).to(parameter.device, copy=True)


def _orthogonalize(low_rank: _LowRankGradient) -> tuple[Tensor, Tensor]:
    """Return an orthonormal basis of the averaged p, and this rank's q for that basis."""
    p = torch.linalg.qr(low_rank.p).Q
    return p, low_rank.matrix.T @ p


def _average_together(
    all_reduce: CompressedAllReduce, plain: Sequence[Tensor], factors: Sequence[Tensor]
) -> list[Tensor]:
    """Average all these tensors in one message: the factors in place; return the means of the plain ones."""
    flat = torch.cat([each.reshape(-1).to(accumulation_dtype(each.dtype)) for each in (*plain, *factors)])
    all_reduce.average(flat, Uncompressed(flat.dtype))
    pieces = torch.split(flat, [each.numel() for each in (*plain, *factors)])
    for factor, piece in zip(factors, pieces[len(plain) :], strict=True):
        factor.copy_(piece.view(factor.shape))
    return [piece.view(each.shape) for each, piece in zip(plain, pieces, strict=False)]
