"""The gradients of one set of parameters, summed over all lanes of all ranks along the tree [Note: tree].

Inside a rank the partial sums are the tensors autograd itself made: an even lane's gradients are taken over, its odd
sibling's backward pass adds to them, and further levels are added when two siblings meet. Between ranks, buckets of
gradients start on their way from hooks inside the last lane's backward pass, while the rest is still being computed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lockstep.engine.buckets import Bucket
from lockstep.engine.channel import Channel, Job
from lockstep.engine.exchange import Exchange, own_part
from lockstep.engine.scaling import scale_gradients
from lockstep.engine.sharding import Sharding
from lockstep.engine.tree import Node, TreeSum, cover, leaf
from lockstep.errors import LockstepError, UserError

Gradients = list[Tensor | None]  # of a bucket's parameters; None: not used
Partial = list[Gradients | None]  # by bucket; None: already on its way to the other ranks
Scale = Callable[[], Tensor]  # one over a count, asked for when it is needed


class GradientTree(ABC):
    """Used lane by lane: `begin`; `open_lane`, backward passes, `close_lane`, …; `finish`, with the sums in `.grad`.

    `.grad` is borrowed between opening and closing a lane only, so several trees can take turns on the same parameters
    (a loss of several terms has one each).
    """

    def __init__(self, members: Sequence[Sequence[Parameter]], lanes: range) -> None:
        """`members`: the parameters, by bucket; `lanes`: this rank's."""
        self._members = members
        self._lanes = lanes
        self._is_checked = False

    def begin(self) -> None:
        """Also where an earlier pass was left in the middle: what is left of it is forgotten."""
        self._sums: TreeSum[Partial] = TreeSum(_add_partials)
        self._next_lane = self._lanes.start
        self._sibling: Partial | None = None  # what the open lane's backward pass adds to
        self._versions: list[list[int]] = []

    def open_lane(self, lane: int, *, one_pass: bool) -> None:
        """There must be no gradients yet. `one_pass`: there will be a single backward pass, so that autograd's own `+=`
        can be the tree's addition."""
        self._skip_to(lane)
        self._next_lane = lane + 1
        self._node = leaf(lane)
        if one_pass and lane % 2 and self._sums.newest == leaf(lane - 1):
            self._node, self._sibling = self._node.parent, self._sums.pop()[1]
            self._versions = []
            for members, gradients in zip(self._members, self._sibling, strict=True):
                assert gradients is not None
                self._versions.append([-1 if gradient is None else gradient._version for gradient in gradients])
                for parameter, gradient in zip(members, gradients, strict=True):
                    parameter.grad = gradient

    def close_lane(self) -> None:
        self._check_layout()
        self._sums.push(self._node, [self._taken(bucket) for bucket in range(len(self._members))])
        self._sibling = None
        for members in self._members:
            for parameter in members:
                parameter.grad = None

    def overlap(self, scale: Scale) -> None:  # noqa: B027
        """The backward pass that follows is this rank's last."""

    def send(self, scale: Scale) -> None:  # noqa: B027
        """All lanes are closed: what has to travel leaves now, if it has not left yet."""

    @abstractmethod
    def finish(self, scale: Scale) -> None:
        """Leave in `.grad` the sum over all lanes of all ranks, scaled; None where no lane used the parameter."""

    def close(self) -> None:  # noqa: B027
        """Let go of the parameters."""

    def _check_layout(self) -> None:
        if self._is_checked:
            return
        self._is_checked = True
        if any(p.grad is not None and p.grad.layout != torch.strided for members in self._members for p in members):
            raise UserError("sparse gradients cannot be summed in lockstep mode: use Embedding(…, sparse=False)")

    def _skip_to(self, lane: int) -> None:
        """Lanes without a backward pass count as zeros."""
        for skipped in range(self._next_lane, lane):
            self._sums.push(leaf(skipped), [[None] * len(members) for members in self._members])

    def _taken(self, bucket: int) -> Gradients | None:
        """What the open lane has left in `.grad`, with what it was added to."""
        gradients = [parameter.grad for parameter in self._members[bucket]]
        if self._sibling is not None:
            for gradient, version in zip(gradients, self._versions[bucket], strict=True):
                # Where only one of the two siblings used the parameter, the other counts as zeros, as it would on a
                # rank of its own; adding them is not nothing: it turns -0.0 into 0.0.
                if gradient is not None and version in (-1, gradient._version):
                    gradient.add_(0.0)
        return gradients


class OneRankGradients(GradientTree):
    """All lanes are here: nothing travels, so nothing is copied into buffers."""

    def __init__(self, parameters: Sequence[Parameter], lanes: range) -> None:
        super().__init__([parameters], lanes)

    def finish(self, scale: Scale) -> None:
        self._skip_to(self._lanes.stop)
        (gradients,) = self._sums.total()
        assert gradients is not None
        for parameter, gradient in zip(self._members[0], gradients, strict=True):
            parameter.grad = gradient
        scale_gradients([gradient for gradient in gradients if gradient is not None], scale())


class _Sent(NamedTuple):
    """A bucket on its way, and which of its parameters were used on this rank."""

    job: Job
    used: list[bool]


class ManyRanksGradients(GradientTree):
    """Buckets travel in their fixed order as soon as the last lane's backward pass has completed them."""

    def __init__(
        self,
        members: Sequence[Sequence[Parameter]],
        lanes: range,
        buckets: Sequence[Bucket],
        channel: Channel,
        exchange: Exchange,
    ) -> None:
        super().__init__(members, lanes)
        self._buckets = buckets
        self._channel = channel
        self._exchange = exchange
        # Kept from step to step: fresh memory would cost more than the copying, in page faults.
        self._buffers = [[bucket.new_buffer(channel.carrier) for _ in cover(lanes)] for bucket in buckets]
        self._pending: list[int] | None = None  # by bucket: gradients still to come in the last backward pass
        self._sent: list[_Sent] = []  # by bucket
        self._scale: Scale | None = None
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, bucket))  # type: ignore[no-untyped-call]
            for bucket, members in enumerate(self._members)
            for parameter in members
        ]

    def begin(self) -> None:
        super().begin()
        self._pending = None
        for sent in self._sent:
            sent.job.result()  # of a pass that no update asked for; its buffers are about to be used again
        self._sent = []

    def overlap(self, scale: Scale) -> None:
        self._scale = scale
        self._pending = [len(members) for members in self._members]

    def close_lane(self) -> None:
        self._pending = None
        super().close_lane()

    def send(self, scale: Scale) -> None:
        self._scale = scale
        self._skip_to(self._lanes.stop)
        self._next_lane = self._lanes.stop
        while len(self._sent) < len(self._buckets):
            self._send_next(list(self._sums))

    def finish(self, scale: Scale) -> None:
        self.send(scale)
        for bucket, members, (job, used_here) in zip(self._buckets, self._members, self._sent, strict=True):
            flat: Tensor = job.result()
            # Views of a buffer that the next step fills again: whoever keeps a gradient must copy it.
            for parameter, view in zip(members, bucket.views(flat), strict=True):
                parameter.grad = view.to(parameter.device)
            if not all(used_here):
                used = flat[bucket.num_gradients :].tolist()
                for parameter, num_ranks in zip(members, used, strict=True):
                    if num_ranks == 0:
                        parameter.grad = None
        self._sent = []

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _taken(self, bucket: int) -> Gradients | None:
        return None if bucket < len(self._sent) else super()._taken(bucket)

    def _on_gradient(self, bucket: int, _parameter: Tensor) -> None:
        if self._pending is None:
            return
        self._pending[bucket] -= 1
        if self._pending[bucket] < 0:
            raise LockstepError(
                "a parameter got its gradient twice in one backward pass; if this is re-entrant checkpointing, "
                "use torch.utils.checkpoint.checkpoint(…, use_reentrant=False)"
            )
        while len(self._sent) < len(self._buckets) and self._pending[len(self._sent)] == 0:
            number = len(self._sent)
            current: Partial = [None] * len(self._buckets)
            current[number] = self._taken(number)
            self._send_next([*self._sums, (self._node, current)])

    def _send_next(self, partials: Sequence[tuple[Node, Partial]]) -> None:
        number = len(self._sent)
        bucket = self._buckets[number]
        sums: TreeSum[Gradients] = TreeSum(add_gradients)
        for node, gradients in partials:
            gradients_here = gradients[number]
            assert gradients_here is not None
            sums.push(node, gradients_here)
            gradients[number] = None
        parts, used = self._buffers[number], [False] * len(bucket.indices)
        for part, (_, gradients_here) in zip(parts, sums, strict=True):
            bucket.pack(gradients_here, part)
            used = [already or gradient is not None for already, gradient in zip(used, gradients_here, strict=True)]
        # The copies travel; autograd's own tensors go back to the allocator while the backward pass still runs.
        if self._sibling is not None:
            self._sibling[number] = None
        for parameter in self._members[number]:
            parameter.grad = None
        self._sent.append(_Sent(self._submit(number, parts), used))

    def _submit(self, number: int, parts: Sequence[Tensor]) -> Job:
        finish = partial(self._scale_sum, self._buckets[number])
        return self._channel.submit(self._exchange.sum, parts, finish)

    def _scale_sum(self, bucket: Bucket, summed: Tensor, start: int) -> None:
        assert self._scale is not None
        scale_gradients([summed[: max(0, bucket.num_gradients - start)]], self._scale())


class ShardedGradients(ManyRanksGradients):
    """Each rank gets the sums of its own part of every bucket alone, in its shards' `.grad`. [Note: zero]"""

    def __init__(
        self,
        sharding: Sharding,
        parameters: Sequence[Parameter],
        lanes: range,
        channel: Channel,
        exchange: Exchange,
    ) -> None:
        self._sharded = sharding.buckets_of(parameters)
        members = [each.members for each in self._sharded]
        super().__init__(members, lanes, [each.bucket for each in self._sharded], channel, exchange)
        self._shards = [[sharding.shards[parameter] for parameter in each] for each in members]
        self._keep_gradients = sharding.keep_gradients
        self._usage: Job | None = None

    def begin(self) -> None:
        super().begin()
        if self._usage is not None:
            self._usage.result()
            self._usage = None

    def send(self, scale: Scale) -> None:
        super().send(scale)
        if self._usage is None:
            used = [float(each) for sent in self._sent for each in sent.used]
            self._usage = self._channel.submit(self._share_usage, torch.tensor(used, device=self._channel.carrier))

    def finish(self, scale: Scale) -> None:
        self.send(scale)
        assert self._usage is not None
        used = iter(self._usage.result().tolist())
        for sharded, shards, (job, _) in zip(self._sharded, self._shards, self._sent, strict=True):
            flat: Tensor = job.result()
            for shard, offset in zip(shards, sharded.offsets, strict=True):
                # A view of a buffer that the parameters travel in next: it is valid until the update is made.
                view = flat[offset : offset + shard.numel()]
                shard.grad = view.to(shard.device, copy=self._keep_gradients) if next(used) else None
        self._sent, self._usage = [], None

    def share_parameters(self, concerned: set[Parameter]) -> None:
        """After an update: everybody's shards as whole parameters. Those that were shared are no longer concerned."""
        jobs = []
        for number, (sharded, shards) in enumerate(zip(self._sharded, self._shards, strict=True)):
            if not concerned.issuperset(sharded.members):
                continue
            concerned.difference_update(sharded.members)
            if not self._keep_gradients:
                for shard in shards:  # a view of what is about to be filled with parameters
                    shard.grad = None
            flat = self._buffers[number][0]
            targets = [flat[at : at + shard.numel()] for shard, at in zip(shards, sharded.offsets, strict=True)]
            torch._foreach_copy_(targets, [shard.detach() for shard in shards])
            jobs.append((sharded, self._channel.submit(self._gather, number)))
        for sharded, job in jobs:
            torch._foreach_copy_([each.detach() for each in sharded.members], sharded.bucket.views(job.result()))

    def _submit(self, number: int, parts: Sequence[Tensor]) -> Job:
        return self._channel.submit(self._scatter, number, parts)

    def _scatter(self, number: int, parts: Sequence[Tensor]) -> Tensor:
        assert self._scale is not None
        sharded = self._sharded[number]
        self._exchange.scatter([part[: sharded.bucket.num_gradients] for part in parts], sharded.cuts)
        scale_gradients([parts[0][own_part(self._exchange, sharded.cuts)]], self._scale())
        return parts[0]

    def _gather(self, number: int) -> Tensor:
        flat, sharded = self._buffers[number][0], self._sharded[number]
        self._exchange.gather(flat[: sharded.bucket.num_gradients], sharded.cuts)
        return flat

    def _share_usage(self, used: Tensor) -> Tensor:
        """Where no rank has used a parameter, its shards have no gradient."""
        dist.all_reduce(used, group=self._channel.group)
        return used


def _add_partials(left: Partial, right: Partial) -> Partial:
    return [
        None if ours is None or theirs is None else add_gradients(ours, theirs)
        for ours, theirs in zip(left, right, strict=True)
    ]


def add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """In place, into the left ones. A missing gradient counts as zeros, and stays missing where both are."""
    present = [gradient for gradient in left if gradient is not None]
    others = [gradient for gradient in right if gradient is not None]
    if len(present) == len(others) == len(left):
        torch._foreach_add_(present, others)
        return left
    return [_add_gradient(*pair) for pair in zip(left, right, strict=True)]


def _add_gradient(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None:
        return None if right is None else right.add_(0.0)
    return left.add_(0.0 if right is None else right)
