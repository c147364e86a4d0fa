"""ZeRO: each rank's shards of the parameters, their reduce-scattered gradients, and the all-gather. [Note: zero]

[Note: zero] Each bucket of gradients is cut into one chunk for each rank. A rank gets the sum of its own chunk alone,
lets the optimizer step there, and the new parameters are gathered from all ranks. An optimizer that computes every
element by itself gets the same bits as on whole parameters, provided that its kernels treat every element alike.
They process a tensor in blocks, from its first element on, and may treat the remainder differently. So a parameter is
only cut at multiples of a large block.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lockstep.engine.buckets import Bucket, make_buckets
from lockstep.engine.comm_thread import CommJob, CommThread
from lockstep.engine.gradient_math import BLOCK, all_finite, block_squares, norm_of_blocks, scale_gradients
from lockstep.engine.gradient_tree import DistributedGradientTree, Scale
from lockstep.engine.torch_internals import copy_all_
from lockstep.engine.tree_all_reduce import TreeAllReduce, chunk_of_rank, own_slice
from lockstep.errors import UserError
from lockstep.world.world import World


class ShardRange(NamedTuple):
    """A range of a flattened parameter; it may be empty."""

    start: int
    stop: int


class ShardedBucket(NamedTuple):
    """A bucket, and this rank's shard of each of its parameters."""

    bucket: Bucket
    parameters: list[Parameter]
    bounds: list[int]  # of each rank's chunk
    ranges: list[ShardRange]  # of each parameter, on this rank
    offsets: list[int]  # where each shard starts in the buffer


class ZeroSharding:
    """The shards of all parameters, in groups that are always trained together."""

    def __init__(self, world: World, bucket_bytes: int, *, keep_gradients: bool = False) -> None:
        """`keep_gradients`: gradients must stay valid after the update, too."""
        self._world = world
        self.keep_gradients = keep_gradients
        self.device = world.device
        self._chunk = chunk_of_rank(world.rank, world.size)
        self._bucket_bytes = bucket_bytes
        self._groups: list[tuple[frozenset[Parameter], list[ShardedBucket]]] = []
        self.ranges: dict[Parameter, ShardRange] = {}
        self.shards: dict[Parameter, Parameter] = {}  # views of the parameters' own memory

    def add(self, parameters: Sequence[Parameter]) -> None:
        """Shard the parameters of one optimizer, which must be contiguous."""
        buckets = [self._shard(bucket, parameters) for bucket in make_buckets(parameters, self._bucket_bytes)]
        self._groups.append((frozenset(parameters), buckets))
        for bucket in buckets:
            for parameter, own in zip(bucket.parameters, bucket.ranges, strict=True):
                self.ranges[parameter] = own
                flat = parameter.detach().view(-1)
                self.shards[parameter] = Parameter(flat[own.start : own.stop])

    def buckets_of(self, parameters: Iterable[Parameter]) -> list[ShardedBucket]:
        """Return the buckets that a pass over these parameters fills."""
        wanted, buckets = set(parameters), []
        for group, group_buckets in self._groups:
            if group <= wanted:
                wanted -= group
                buckets += group_buckets
        if wanted:
            raise UserError(
                "parallel=zero: this pass needs gradients of parameters that no optimizer had when training began "
                "(frozen ones do not count), or of only some of an optimizer's: freeze what is not trained, unfreeze "
                "before run.steps(…), pass all models of an optimizer to step.accumulate(loss, models), or use "
                "parallel=ddp"
            )
        return buckets

    def _shard(self, bucket: Bucket, parameters: Sequence[Parameter]) -> ShardedBucket:
        bounds = _block_bounds(bucket, self._world.size)
        start, stop = bounds[self._chunk], bounds[self._chunk + 1]
        ranges, offsets = [], []
        for offset, shape in zip(bucket.offsets, bucket.shapes, strict=True):
            first, last = (min(max(bound - offset, 0), shape.numel()) for bound in (start, stop))
            ranges.append(ShardRange(first, last))
            offsets.append(offset + first)
        return ShardedBucket(bucket, [parameters[index] for index in bucket.indices], bounds, ranges, offsets)


def _block_bounds(bucket: Bucket, num_ranks: int) -> list[int]:
    """Cut a bucket into chunks as equal as whole blocks of its parameters allow."""
    ends = [*bucket.offsets[1:], bucket.num_gradients]
    bounds = [0]
    for chunk in range(1, num_ranks):
        even = bucket.num_gradients * chunk // num_ranks
        offset, shape, end = next(
            each for each in zip(bucket.offsets, bucket.shapes, ends, strict=True) if even < each[2]
        )
        nearest = offset + BLOCK * round((even - offset) / BLOCK)
        bounds.append(max(bounds[-1], nearest if nearest < offset + shape.numel() else end))
    return [*bounds, bucket.num_gradients]


class ShardedGradientTree(DistributedGradientTree):
    """A gradient tree that leaves each rank the sums of its own shards, in the shards' `.grad`. [Note: zero]"""

    def __init__(
        self,
        sharding: ZeroSharding,
        parameters: Sequence[Parameter],
        lanes: range,
        comm: CommThread,
        all_reduce: TreeAllReduce,
    ) -> None:
        self._sharded = sharding.buckets_of(parameters)
        bucket_parameters = [sharded.parameters for sharded in self._sharded]
        super().__init__(bucket_parameters, lanes, [sharded.bucket for sharded in self._sharded], comm, all_reduce)
        self._shards = [[sharding.shards[parameter] for parameter in each] for each in bucket_parameters]
        self._keep_gradients = sharding.keep_gradients
        self._usage: CommJob | None = None  # for each parameter, how many ranks used it

    def begin(self) -> None:
        super().begin()
        if self._usage is not None:
            self._usage.result()
            self._usage = None

    def send(self, scale: Scale) -> None:
        super().send(scale)
        if self._usage is None:
            used = [float(is_used) for sent in self._sent for is_used in sent.used]
            self._usage = self._comm.submit(self._sum_usage, torch.tensor(used, device=self._comm.device))

    def finish(self, scale: Scale) -> None:
        self.send(scale)
        assert self._usage is not None
        num_users = iter(self._usage.result().tolist())
        for sharded, shards, (job, _) in zip(self._sharded, self._shards, self._sent, strict=True):
            flat: Tensor = job.result()
            for shard, offset in zip(shards, sharded.offsets, strict=True):
                # A view of the buffer that the parameters are gathered in next: it is valid until the update is made.
                view = flat[offset : offset + shard.numel()]
                shard.grad = view.to(shard.device, copy=self._keep_gradients) if next(num_users) else None
        self._sent, self._usage = [], None

    def gather_parameters(self, updated: set[Parameter]) -> None:
        """After an update, make every rank's parameters whole again. Removes what it gathers from `updated`."""
        jobs = []
        for index, (sharded, shards) in enumerate(zip(self._sharded, self._shards, strict=True)):
            if not updated.issuperset(sharded.parameters):
                continue
            updated.difference_update(sharded.parameters)
            if not self._keep_gradients:
                for shard in shards:  # a view of what is about to be filled with parameters
                    shard.grad = None
            flat = self._buffers[index][0]
            targets = [flat[at : at + shard.numel()] for shard, at in zip(shards, sharded.offsets, strict=True)]
            copy_all_(targets, [shard.detach() for shard in shards])
            jobs.append((sharded, self._comm.submit(self._all_gather, index)))
        for sharded, job in jobs:
            copy_all_([each.detach() for each in sharded.parameters], sharded.bucket.views(job.result()))

    def _submit(self, index: int, buffers: Sequence[Tensor]) -> CommJob:
        return self._comm.submit(self._reduce_scatter, index, buffers)

    def _reduce_scatter(self, index: int, buffers: Sequence[Tensor]) -> Tensor:
        assert self._scale is not None
        sharded = self._sharded[index]
        num_gradients = sharded.bucket.num_gradients
        self._all_reduce.reduce_scatter([buffer[:num_gradients] for buffer in buffers], sharded.bounds)
        scale_gradients([buffers[0][own_slice(self._all_reduce, sharded.bounds)]], self._scale())
        return buffers[0]

    def _all_gather(self, index: int) -> Tensor:
        flat, sharded = self._buffers[index][0], self._sharded[index]
        self._all_reduce.all_gather(flat[: sharded.bucket.num_gradients], sharded.bounds)
        return flat

    def _sum_usage(self, used: Tensor) -> Tensor:
        dist.all_reduce(used, group=self._comm.group)
        return used


class ShardedReducedGradients:
    """The gradients of this rank's shards; norm and finiteness are computed together with the other ranks."""

    def __init__(self, parameters: Sequence[Parameter], sharding: ZeroSharding, comm: CommThread) -> None:
        self._sharding = sharding
        self._comm = comm
        self._used = [p for p in parameters if sharding.shards[p].grad is not None]  # the same on all ranks
        self.gradients = [_gradient_of(sharding.shards[parameter]) for parameter in self._used]

    def norm(self) -> Tensor:
        """Return the global norm, with the bits that it would have on one rank.

        A shard starts where a block does: so every block is on one rank, with the bits that it has in the whole
        gradient. The other ranks add zeros to it, which changes nothing.
        """
        num_blocks = [-(-parameter.numel() // BLOCK) for parameter in self._used]
        squares = torch.zeros(sum(num_blocks), dtype=torch.float64, device=self._comm.device)
        first = 0
        for parameter, gradient, number in zip(self._used, self.gradients, num_blocks, strict=True):
            start = first + self._sharding.ranges[parameter].start // BLOCK
            own = block_squares(gradient)
            squares[start : start + len(own)] = own
            first += number
        self._sum_over_ranks(squares)
        return norm_of_blocks(squares.to(self._sharding.device))

    def all_finite(self, others: Sequence[Tensor]) -> bool:
        is_nonfinite = not all_finite([*others, *self.gradients])
        return self._sum_over_ranks(torch.tensor([float(is_nonfinite)], device=self._comm.device)).item() == 0.0

    def nonfinite(self, parameters: Sequence[Parameter]) -> list[bool]:
        flags = [
            float(gradient is not None and not all_finite([gradient]))
            for gradient in (self._sharding.shards[parameter].grad for parameter in parameters)
        ]
        return [bool(num) for num in self._sum_over_ranks(torch.tensor(flags, device=self._comm.device)).tolist()]

    def _sum_over_ranks(self, numbers: Tensor) -> Tensor:
        def all_reduce() -> None:
            dist.all_reduce(numbers, group=self._comm.group)

        self._comm.submit(all_reduce).result()
        return numbers


def _gradient_of(parameter: Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
