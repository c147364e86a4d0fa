"""Where a gradient is added: the sum of gradients over all lanes of all ranks, along the fixed tree. [Note: tree]

Four lanes with gradients g0, g1, g2 and g3, whose sum is ((g0 + g1) + (g2 + g3)) on any number of ranks:

One rank (`LocalGradientTree`). Nothing is copied: partial sums are the tensors that autograd allocates in `.grad`.

    lane 0   backward leaves g0 in `.grad`; `close_lane` takes it out                 partial sums: 0
    lane 1   `open_lane` puts g0 back, so autograd's own `+=` makes g0 + g1           partial sums: (0,1)
    lane 2   backward leaves g2; `close_lane` takes it out                            partial sums: (0,1), 2
    lane 3   autograd makes g2 + g3; `close_lane` adds that to (0,1), in place        partial sums: (0..3)
    finish   the root goes into `.grad` and is scaled by one over the count

At most two sets of gradients exist at a time: with 2^k lanes, at most k. If a lane has several backward passes, each
lane starts with an empty `.grad` instead, and lanes 0 and 1 are added when lane 1 is closed.

Two ranks (`DistributedGradientTree`), lanes {0, 1} and {2, 3}. Each rank has one partial sum to send: rank 0 (0,1),
rank 1 (2,3). Parameters are grouped into buckets, and every bucket has one flat buffer for each such partial sum.

    lane 0   as above, and lane 2 on rank 1
    lane 1   the rank's last lane, lane 3 on rank 1: while its backward pass runs, a hook counts the gradients of each
             bucket. When a bucket is complete, its partial sum is copied into the flat buffer, `.grad` is freed, and
             the buffer is handed to the communication thread. Buckets leave in a fixed order, the last layers first.
    thread   each rank sends its whole buffer; both compute (0,1) + (2,3), and scale it
    finish   waits for the thread; `.grad` becomes a view of the flat buffer

Three ranks, lanes {0}, {1} and {2, 3}, again with one partial sum each: 0, 1 and (2,3). A buffer is cut into three
chunks, and rank r receives chunk r of the other ranks' buffers. It adds 0 + 1, adds (2,3) to that, scales it, and sends
the result to the others (`tree_all_reduce`). A rank whose lanes make up several subtrees, as {1, 2} on the middle one
of three ranks, has a buffer for each and sends each: 1 and 2 are not siblings, so it must not add them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep.engine.buckets import Bucket
from lockstep.engine.comm_thread import CommJob, CommThread
from lockstep.engine.gradient_math import scale_gradients
from lockstep.engine.lane_tree import TreeNode, TreeSum, covering_nodes, leaf
from lockstep.engine.torch_internals import add_all_, version_of
from lockstep.engine.tree_all_reduce import TreeAllReduce
from lockstep.errors import LockstepError, UserError

Gradients = list[Tensor | None]  # of a bucket's parameters; None: the parameter was not used
PartialSum = list[Gradients | None]  # by bucket; None: already handed to the communication thread
Scale = Callable[[], Tensor]  # returns one over a count; called when the count of all ranks is needed

_UNUSED = -1  # instead of a version, for a parameter without a gradient


class GradientTree(ABC):
    """The sum of some parameters' gradients: `begin`, then for each lane `open_lane`, backward, `close_lane`; `finish`.

    `.grad` is in use only while a lane is open, so several trees can take turns on the same parameters: a loss of
    several terms has a tree for each term.
    """

    def __init__(self, bucket_parameters: Sequence[Sequence[Parameter]], lanes: range) -> None:
        """`bucket_parameters`: the parameters of each bucket; `lanes`: those of this rank."""
        self._bucket_parameters = bucket_parameters
        self._lanes = lanes
        self._is_layout_checked = False

    def begin(self) -> None:
        """Start a new sum, and discard what an unfinished pass has left behind."""
        self._sums: TreeSum[PartialSum] = TreeSum(_add_partial_sums)
        self._next_lane = self._lanes.start
        self._left_sibling: PartialSum | None = None  # what the open lane's backward pass adds to
        self._sibling_versions: list[list[int]] = []

    def open_lane(self, lane: int, *, one_pass: bool) -> None:
        """Prepare `.grad`, which must be empty, for a lane's backward pass.

        `one_pass`: there will be a single backward pass, so autograd's own `+=` can make the tree's addition.
        """
        self._add_zeros_up_to(lane)
        self._next_lane = lane + 1
        self._node = leaf(lane)
        if one_pass and lane % 2 and self._sums.last_node == leaf(lane - 1):
            self._node, self._left_sibling = self._node.parent, self._sums.pop()[1]
            self._sibling_versions = []
            for parameters, gradients in zip(self._bucket_parameters, self._left_sibling, strict=True):
                assert gradients is not None
                self._sibling_versions.append([_UNUSED if g is None else version_of(g) for g in gradients])
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient

    def close_lane(self) -> None:
        """Take the lane's gradients out of `.grad` and add them to the partial sums."""
        self._check_layout()
        self._sums.push(self._node, [self._take_gradients(index) for index in range(len(self._bucket_parameters))])
        self._left_sibling = None
        for parameters in self._bucket_parameters:
            for parameter in parameters:
                parameter.grad = None

    def overlap(self, scale: Scale) -> None:  # noqa: B027
        """Announce this rank's last backward pass: gradients may be sent while it runs."""

    def send(self, scale: Scale) -> None:  # noqa: B027
        """Send everything that was not sent during the last backward pass. All lanes are closed."""

    @abstractmethod
    def finish(self, scale: Scale) -> None:
        """Leave in `.grad` the sum over all lanes of all ranks, scaled; None where no lane used the parameter."""

    def close(self) -> None:  # noqa: B027
        """Remove the hooks from the parameters."""

    def _check_layout(self) -> None:
        if self._is_layout_checked:
            return
        self._is_layout_checked = True
        gradients = [parameter.grad for parameters in self._bucket_parameters for parameter in parameters]
        if any(gradient is not None and gradient.layout != torch.strided for gradient in gradients):
            raise UserError("sparse gradients cannot be summed in lockstep mode: use Embedding(…, sparse=False)")

    def _add_zeros_up_to(self, lane: int) -> None:
        """Count the lanes without a backward pass as zeros."""
        for skipped in range(self._next_lane, lane):
            self._sums.push(leaf(skipped), [[None] * len(parameters) for parameters in self._bucket_parameters])

    def _take_gradients(self, index: int) -> Gradients | None:
        """Return a bucket's `.grad` after the open lane: its gradients, or their sum with the left sibling's."""
        gradients = [parameter.grad for parameter in self._bucket_parameters[index]]
        if self._left_sibling is not None:
            for gradient, version in zip(gradients, self._sibling_versions[index], strict=True):
                # If only one of the two siblings used the parameter, the other counts as zeros, as it would on another
                # rank. Adding zeros is not a no-op: it turns -0.0 into 0.0.
                if gradient is not None and version in (_UNUSED, version_of(gradient)):
                    gradient.add_(0.0)
        return gradients


class LocalGradientTree(GradientTree):
    """All lanes are on this rank: nothing is sent, so nothing is copied into buffers."""

    def __init__(self, parameters: Sequence[Parameter], lanes: range) -> None:
        super().__init__([parameters], lanes)

    def finish(self, scale: Scale) -> None:
        self._add_zeros_up_to(self._lanes.stop)
        (gradients,) = self._sums.total()
        assert gradients is not None
        for parameter, gradient in zip(self._bucket_parameters[0], gradients, strict=True):
            parameter.grad = gradient
        scale_gradients([gradient for gradient in gradients if gradient is not None], scale())


class SentBucket(NamedTuple):
    """A bucket handed to the communication thread, and which of its parameters were used on this rank."""

    job: CommJob
    used: list[bool]


class DistributedGradientTree(GradientTree):
    """Lanes are on several ranks: buckets are sent in a fixed order, as the last backward pass completes them."""

    def __init__(
        self,
        bucket_parameters: Sequence[Sequence[Parameter]],
        lanes: range,
        buckets: Sequence[Bucket],
        comm: CommThread,
        all_reduce: TreeAllReduce,
    ) -> None:
        super().__init__(bucket_parameters, lanes)
        self._buckets = buckets
        self._comm = comm
        self._all_reduce = all_reduce
        # For each bucket, a buffer for each subtree of this rank's lanes. Kept from step to step: the page faults of
        # fresh memory would cost more than the copying.
        self._buffers = [[bucket.new_buffer(comm.device) for _ in covering_nodes(lanes)] for bucket in buckets]
        self._num_missing: list[int] | None = None  # by bucket: gradients still to come in the last backward pass
        self._sent: list[SentBucket] = []
        self._scale: Scale | None = None
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, index))  # type: ignore[no-untyped-call]
            for index, parameters in enumerate(self._bucket_parameters)
            for parameter in parameters
        ]

    def begin(self) -> None:
        super().begin()
        self._num_missing = None
        for sent in self._sent:
            sent.job.result()  # no update has waited for it, and its buffers are about to be refilled
        self._sent = []

    def overlap(self, scale: Scale) -> None:
        self._scale = scale
        self._num_missing = [len(parameters) for parameters in self._bucket_parameters]

    def close_lane(self) -> None:
        self._num_missing = None
        super().close_lane()

    def send(self, scale: Scale) -> None:
        self._scale = scale
        self._add_zeros_up_to(self._lanes.stop)
        self._next_lane = self._lanes.stop
        while len(self._sent) < len(self._buckets):
            self._send_next_bucket(list(self._sums))

    def finish(self, scale: Scale) -> None:
        self.send(scale)
        for bucket, parameters, (job, used_here) in zip(
            self._buckets, self._bucket_parameters, self._sent, strict=True
        ):
            flat: Tensor = job.result()
            # Views of a buffer that the next step fills again: copy a gradient to keep it.
            for parameter, view in zip(parameters, bucket.views(flat), strict=True):
                parameter.grad = view.to(parameter.device)
            if not all(used_here):
                num_users = flat[bucket.num_gradients :].tolist()
                for parameter, num in zip(parameters, num_users, strict=True):
                    if num == 0:
                        parameter.grad = None
        self._sent = []

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _take_gradients(self, index: int) -> Gradients | None:
        return None if index < len(self._sent) else super()._take_gradients(index)

    def _on_gradient(self, index: int, _parameter: Tensor) -> None:
        """Hook: autograd has added the last lane's gradient to the `.grad` of a parameter in bucket `index`."""
        if self._num_missing is None:
            return
        self._num_missing[index] -= 1
        if self._num_missing[index] < 0:
            raise LockstepError(
                "a parameter received its gradient twice in one backward pass; if this is reentrant checkpointing, "
                "use torch.utils.checkpoint.checkpoint(…, use_reentrant=False)"
            )
        while len(self._sent) < len(self._buckets) and self._num_missing[len(self._sent)] == 0:
            next_index = len(self._sent)
            last_lane: PartialSum = [None] * len(self._buckets)
            last_lane[next_index] = self._take_gradients(next_index)
            self._send_next_bucket([*self._sums, (self._node, last_lane)])

    def _send_next_bucket(self, partial_sums: Sequence[tuple[TreeNode, PartialSum]]) -> None:
        """Add up the next bucket's part of these partial sums, copy the result into its buffers, and submit them."""
        index = len(self._sent)
        bucket = self._buckets[index]
        sums: TreeSum[Gradients] = TreeSum(add_gradients)
        for node, by_bucket in partial_sums:
            gradients = by_bucket[index]
            assert gradients is not None
            sums.push(node, gradients)
            by_bucket[index] = None
        buffers, used = self._buffers[index], [False] * len(bucket.indices)
        for buffer, (_, gradients) in zip(buffers, sums, strict=True):
            bucket.pack(gradients, buffer)
            used = [already or gradient is not None for already, gradient in zip(used, gradients, strict=True)]
        # The copies are sent; autograd's own tensors go back to the allocator while the backward pass still runs.
        if self._left_sibling is not None:
            self._left_sibling[index] = None
        for parameter in self._bucket_parameters[index]:
            parameter.grad = None
        self._sent.append(SentBucket(self._submit(index, buffers), used))

    def _submit(self, index: int, buffers: Sequence[Tensor]) -> CommJob:
        scale_chunk = partial(self._scale_chunk, self._buckets[index])
        return self._comm.submit(self._all_reduce.all_reduce, buffers, scale_chunk)

    def _scale_chunk(self, bucket: Bucket, chunk: Tensor, start: int) -> None:
        """Scale a summed chunk of a buffer, but not the counts of users that follow the gradients."""
        assert self._scale is not None
        scale_gradients([chunk[: max(0, bucket.num_gradients - start)]], self._scale())


def _add_partial_sums(left: PartialSum, right: PartialSum) -> PartialSum:
    return [
        None if ours is None or theirs is None else add_gradients(ours, theirs)
        for ours, theirs in zip(left, right, strict=True)
    ]


def add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """Add two lists of gradients, in place into the left one.

    A missing gradient counts as zeros; the sum is missing where both are.
    """
    ours = [gradient for gradient in left if gradient is not None]
    theirs = [gradient for gradient in right if gradient is not None]
    if len(ours) == len(theirs) == len(left):
        add_all_(ours, theirs)
        return left
    return [_add_gradient(*pair) for pair in zip(left, right, strict=True)]


def _add_gradient(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None:
        return None if right is None else right.add_(0.0)
    return left.add_(0.0 if right is None else right)
