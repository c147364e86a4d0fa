"""Which rank has which stretch of every parameter, and runs the optimizer there. [Note: zero]

Each bucket of gradients is cut into a part for each rank, which gets the sum of that part alone, lets the optimizer
step there, and shares the new parameters. An optimizer that computes every element by itself comes to the same bits as
on whole parameters, provided that its kernels treat every element alike. They take a tensor in blocks, from its first
element on, and may treat what is left of it otherwise. So a parameter is cut at multiples of a large block alone.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch.nn import Parameter

from lockstep.engine.buckets import Bucket, make_buckets
from lockstep.engine.exchange import place_of
from lockstep.engine.norm import BLOCK
from lockstep.errors import UserError
from lockstep.world.world import World


class Stretch(NamedTuple):
    """Of a flattened parameter; it may be empty."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


class ShardedBucket(NamedTuple):
    bucket: Bucket
    members: list[Parameter]
    cuts: list[int]
    stretches: list[Stretch]  # this rank's, of each member
    offsets: list[int]  # where each begins in the buffer


class Sharding:
    """Of all parameters that were handed over, in groups that are always trained together."""

    def __init__(self, world: World, bucket_bytes: int, *, keep_gradients: bool = False) -> None:
        """`keep_gradients`: somebody wants to see them after an update, too."""
        self._world = world
        self.keep_gradients = keep_gradients
        self.device = world.device
        self._place = place_of(world.rank, world.size)
        self._bucket_bytes = bucket_bytes
        self._groups: list[tuple[frozenset[Parameter], list[ShardedBucket]]] = []
        self.stretches: dict[Parameter, Stretch] = {}
        self.shards: dict[Parameter, Parameter] = {}  # views of the parameters' own memory

    def add(self, parameters: Sequence[Parameter]) -> None:
        """Those of one optimizer; contiguous."""
        buckets = [self._cut(bucket, parameters) for bucket in make_buckets(parameters, self._bucket_bytes)]
        self._groups.append((frozenset(parameters), buckets))
        for bucket in buckets:
            for parameter, stretch in zip(bucket.members, bucket.stretches, strict=True):
                self.stretches[parameter] = stretch
                flat = parameter.detach().view(-1)
                self.shards[parameter] = Parameter(flat[stretch.start : stretch.stop])

    def buckets_of(self, parameters: Iterable[Parameter]) -> list[ShardedBucket]:
        """Those that a pass over these parameters fills."""
        wanted, buckets = set(parameters), []
        for group, theirs in self._groups:
            if group <= wanted:
                wanted -= group
                buckets += theirs
        if wanted:
            raise UserError(
                "parallel=zero: a pass over the lanes concerns parameters that no optimizer had when training began "
                "(frozen ones do not count), or a part of an optimizer's alone: freeze what is not trained, unfreeze "
                "before run.steps(…), let step.accumulate(loss, models) name all models of an optimizer, or take "
                "parallel=ddp"
            )
        return buckets

    def _cut(self, bucket: Bucket, parameters: Sequence[Parameter]) -> ShardedBucket:
        members = [parameters[index] for index in bucket.indices]
        cuts = _cuts(bucket, self._world.size)
        start, stop = cuts[self._place], cuts[self._place + 1]
        stretches, offsets = [], []
        for offset, shape in zip(bucket.offsets, bucket.shapes, strict=True):
            first, last = (min(max(cut - offset, 0), shape.numel()) for cut in (start, stop))
            stretches.append(Stretch(first, last))
            offsets.append(offset + first)
        return ShardedBucket(bucket, members, cuts, stretches, offsets)


def _cuts(bucket: Bucket, num_ranks: int) -> list[int]:
    """As even as the blocks allow."""
    ends = [*bucket.offsets[1:], bucket.num_gradients]
    cuts = [0]
    for place in range(1, num_ranks):
        even = bucket.num_gradients * place // num_ranks
        offset, shape, end = next(
            each for each in zip(bucket.offsets, bucket.shapes, ends, strict=True) if even < each[2]
        )
        nearest = offset + BLOCK * round((even - offset) / BLOCK)
        cuts.append(max(cuts[-1], nearest if nearest < offset + shape.numel() else end))
    return [*cuts, bucket.num_gradients]
