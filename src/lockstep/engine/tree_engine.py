"""The engine of `determinism: lockstep`: gradients and buffers with the same bits on any number of ranks.

A pass over the lanes fills a `LossTable`, a `GradientTree` for each term of the loss, and `LaneBuffers`. On several
ranks, the table is sent when a rank's last loss is known, then the gradients, bucket by bucket, then the buffers: all
on one communication thread, so in the same order on every rank.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from lockstep.data.lanes import Lanes
from lockstep.engine.buckets import make_buckets
from lockstep.engine.comm_thread import CommJob, CommThread
from lockstep.engine.compiled_models import named_modules, named_parameters
from lockstep.engine.engine import (
    BackwardCounter,
    CommStats,
    FullGradients,
    ReducedGradients,
    all_parameters,
    backward_inputs,
    require_no_gradients,
    run_backward,
)
from lockstep.engine.gradient_tree import (
    DistributedGradientTree,
    GradientTree,
    LocalGradientTree,
    Scale,
    add_gradients,
)
from lockstep.engine.lane_buffers import BufferRule, LaneBuffers
from lockstep.engine.loss_table import ControlFlags, LossTable, Terms
from lockstep.engine.torch_internals import version_of
from lockstep.engine.tree_all_reduce import choose_all_reduce
from lockstep.engine.zero_sharding import ShardedGradientTree, ShardedReducedGradients, ZeroSharding
from lockstep.errors import UserError
from lockstep.world.world import World

DEFAULT_BUCKET_BYTES = 4 * 2**20


class TreeEngine:
    """Sums gradients over lanes along the tree [Note: tree]: on one rank, on several, or sharded [Note: zero]."""

    can_replay = True

    def __init__(
        self,
        world: World,
        lanes: Lanes,
        models: Sequence[nn.Module],
        *,
        buffer_rules: Mapping[str, BufferRule],
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        control_flags: ControlFlags | None = None,
        sharding: ZeroSharding | None = None,
    ) -> None:
        """Create the engine.

        Args:
            world: this rank, and how many there are.
            lanes: the lanes of each rank.
            models: the models whose parameters and buffers are trained.
            buffer_rules: by a pattern of buffer names, how the lanes' values are combined.
            bucket_bytes: about how many bytes of gradients are sent together.
            control_flags: what ranks request of all ranks; sent with every step.
            sharding: leaves each rank the gradients of its own shards only.
        """
        for model in models:
            _refuse_collectives_in_forward(model)
        self.world = world
        self.control_flags = ControlFlags() if control_flags is None else control_flags
        self._models = models
        self.lanes = lanes
        self.own_lanes = lanes.of(world.rank)
        self.last_lane = self.own_lanes[-1]
        self.comm = CommThread(world) if world.size > 1 else None
        self.comm_device = world.device if self.comm is None else self.comm.device
        self.all_reduce = None if self.comm is None else choose_all_reduce(self.comm, world.rank, lanes)
        self.buffers = LaneBuffers(models, buffer_rules)
        self._bucket_bytes = bucket_bytes
        self.sharding = sharding if self.comm is not None else None
        self.hides_gradients = self.sharding is not None
        self._all_parameters = all_parameters(models)
        self._trees: dict[tuple[int, ...], list[GradientTree]] = {}

    def start_pass(self, parameters: Sequence[Parameter], *, divide_late: bool = False) -> "TreePass":  # noqa: ARG002
        """Start a pass for the gradients of these parameters; those of others are not touched."""
        return TreePass(self, parameters, backward_inputs(parameters, self._all_parameters))

    def trees(self, parameters: Sequence[Parameter], num_terms: int) -> list[GradientTree]:
        """Return a gradient tree for each term of the loss. Trees are kept from step to step."""
        trees = self._trees.setdefault(tuple(map(id, parameters)), [])
        while len(trees) < num_terms:
            trees.append(self._new_tree(parameters))
        return trees[:num_terms]

    def name_of(self, parameter: Parameter) -> str:
        """Return a parameter's name in its model."""
        names = (name for model in self._models for name, other in named_parameters(model) if other is parameter)
        return next(names, "(unnamed)")

    def holders(self, parameters: Sequence[Parameter]) -> Sequence[Parameter]:
        """Return the tensors whose `.grad` holds what this rank gets: the parameters, or this rank's shards of them."""
        return parameters if self.sharding is None else [self.sharding.shards[parameter] for parameter in parameters]

    def reduced(self, parameters: Sequence[Parameter]) -> ReducedGradients:
        if self.sharding is None or self.comm is None:
            return FullGradients(parameters)
        return ShardedReducedGradients(parameters, self.sharding, self.comm)

    def after_update(self, parameters: Sequence[Parameter]) -> None:
        updated = set(parameters)
        for tree, *_ in self._trees.values():  # passes over different sets of models may share parameters
            if isinstance(tree, ShardedGradientTree):
                tree.gather_parameters(updated)

    def comm_stats(self, *, timed: bool) -> CommStats:
        if self.comm is None:
            return CommStats(0.0)
        return CommStats(self.comm.busy_s(timed=timed), self.comm.bytes_sent)

    def close(self, *, abandon: bool = False) -> None:
        for trees in self._trees.values():
            for tree in trees:
                tree.close()
        self._trees = {}
        if self.comm is not None:
            self.comm.close(abandon=abandon)

    def _new_tree(self, parameters: Sequence[Parameter]) -> GradientTree:
        if self.comm is None or self.all_reduce is None:
            return LocalGradientTree(parameters, self.own_lanes)
        if self.sharding is not None:
            return ShardedGradientTree(self.sharding, parameters, self.own_lanes, self.comm, self.all_reduce)
        buckets = make_buckets(parameters, self._bucket_bytes)
        bucket_parameters = [[parameters[index] for index in bucket.indices] for bucket in buckets]
        return DistributedGradientTree(bucket_parameters, self.own_lanes, buckets, self.comm, self.all_reduce)


class TreePass:
    """One pass over this rank's lanes, for the gradients of some parameters."""

    def __init__(self, engine: TreeEngine, parameters: Sequence[Parameter], inputs: Sequence[Parameter] | None) -> None:
        self._engine = engine
        self._parameters = parameters
        self._inputs = inputs
        self._table = LossTable(engine.lanes.count, engine.comm_device)
        self._table_job: CommJob | None = None
        self._buffers_job: CommJob | None = None
        self._trees: list[GradientTree] = []  # one for each term of the loss, once their number is known
        self._backwards = BackwardCounter()
        self._versions = [version_of(parameter) for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        engine.buffers.begin()

    def open_lane(self, lane: int, size: int) -> None:
        self._lane = lane
        self._size = size
        self._backwards.open_lane()
        self._table.add_lane(lane, size)
        self._engine.buffers.open_lane()

    def backward(self, terms: Terms, *, more: bool, retain_graph: bool = False) -> None:
        is_only = self._backwards.add(len(terms), more=more)
        self._table.record(self._lane, terms)
        self._trees = self._trees or self._begin_trees(len(terms))
        is_last = not more and self._lane == self._engine.last_lane
        if is_last:
            self._send_table()
        for number, (tree, (loss_sum, _)) in enumerate(zip(self._trees, terms.values(), strict=True)):
            if self._backwards.count == 1:
                require_no_gradients(self._parameters)
                tree.open_lane(self._lane, one_pass=is_only)
            if is_last:
                tree.overlap(self._scale(number))
            retains = retain_graph or number < len(self._trees) - 1
            run_backward([loss_sum], [torch.ones_like(loss_sum)], retain_graph=retains, inputs=self._inputs)
            if not more:
                tree.close_lane()
            if is_last:
                # Before the next term's backward pass, so that all ranks send the terms in the same order.
                tree.send(self._scale(number))

    def close_lane(self) -> None:
        self._backwards.close_lane()
        self._engine.buffers.close_lane(self._lane, self._size)

    def end(self) -> None:
        require_no_gradients(self._parameters)
        if self._versions != [version_of(parameter) for parameter in self._parameters]:
            self._raise_changed_parameter()
        self._engine.buffers.check()
        self._table.check_counts()
        self._send_table()
        if self._engine.comm is None or self._engine.all_reduce is None:
            return
        for number, tree in enumerate(self._all_trees()):
            tree.send(self._scale(number))
        if self._engine.buffers.any_managed:
            self._buffers_job = self._engine.comm.submit(self._combine_buffers)

    def finish(self) -> None:
        holders = self._engine.holders(self._parameters)
        for number, tree in enumerate(self._all_trees()):
            earlier_terms = [holder.grad for holder in holders] if number else None
            tree.finish(self._scale(number))
            if earlier_terms is not None:
                gradients = add_gradients(earlier_terms, [holder.grad for holder in holders])
                for holder, gradient in zip(holders, gradients, strict=True):
                    holder.grad = gradient
        if self._buffers_job is not None:
            self._buffers_job.result()
        elif self._engine.comm is None:
            self._engine.buffers.combine()

    def loss(self) -> Tensor:
        return self._table.loss()

    def loss_sums(self) -> list[Tensor]:
        return self._table.loss_sums()

    def nonfinite_lanes(self) -> list[int]:
        return self._table.nonfinite_lanes()

    def _raise_changed_parameter(self) -> NoReturn:
        changed = next(
            parameter
            for parameter, version in zip(self._parameters, self._versions, strict=True)
            if version_of(parameter) != version
        )
        raise UserError(
            f"the forward pass changes the parameter {self._engine.name_of(changed)}, so later lanes would see a "
            "different model (an Embedding with max_norm?): use determinism=fast with parallel=ddp"
        )

    def _send_table(self) -> None:
        """Send this rank's sums and counts ahead of the first gradients, which all ranks' counts scale."""
        comm = self._engine.comm
        if comm is not None and self._table_job is None:
            rows = self._table.local(self._engine.control_flags.take_own())
            self._table_job = comm.submit(self._sum_table, rows, comm.group)

    def _all_trees(self) -> list[GradientTree]:
        if not self._trees:
            # No lane of this rank had a loss: the other ranks know how many terms there are.
            if self._table_job is not None:
                self._table_job.result()
            if self._table.num_terms == 0:
                raise UserError("no lane had a loss: call step.backward(…) in at least one")
            self._trees = self._begin_trees(self._table.num_terms)
        return self._trees

    def _begin_trees(self, num_terms: int) -> list[GradientTree]:
        trees = self._engine.trees(self._parameters, num_terms)
        for tree in trees:
            tree.begin()
        return trees

    def _scale(self, term: int) -> Scale:
        return partial(self._table.scale, term)

    def _sum_table(self, rows: Tensor, group: dist.ProcessGroup | None) -> None:
        dist.all_reduce(rows, group=group)
        self._table.complete(rows)
        self._engine.control_flags.receive(self._table.flags)
        if rows.is_cpu:  # reading it on a GPU would make the host wait, in every step
            self._table.check_names()

    def _combine_buffers(self) -> None:
        engine = self._engine
        assert engine.comm is not None and engine.all_reduce is not None
        engine.buffers.combine_over_ranks(engine.comm, engine.all_reduce, engine.lanes, self._table.sizes)


def _refuse_collectives_in_forward(model: nn.Module) -> None:
    for name, module in named_modules(model):
        if isinstance(module, nn.SyncBatchNorm):
            raise UserError(
                f"{name} is a SyncBatchNorm, whose statistics depend on the number of processes: "
                "use BatchNorm (lanes give it a fixed batch), or determinism=fast with parallel=ddp"
            )
