"""`determinism: lockstep`: gradients and buffers over all lanes, the same bits on any number of ranks."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from lockstep.data.lanes import Lanes
from lockstep.engine.buckets import make_buckets
from lockstep.engine.buffers import LaneBuffers, Rule
from lockstep.engine.channel import Channel, Job
from lockstep.engine.engine import (
    BackwardPasses,
    Travel,
    all_parameters,
    inputs_for,
    require_no_gradients,
    run_backward,
)
from lockstep.engine.exchange import choose_exchange
from lockstep.engine.gradients import (
    GradientTree,
    ManyRanksGradients,
    OneRankGradients,
    Scale,
    ShardedGradients,
    add_gradients,
)
from lockstep.engine.reduced import Reduced, ShardedSums, WholeGradients
from lockstep.engine.requests import Requests
from lockstep.engine.sharding import Sharding
from lockstep.engine.table import LaneTable, Terms
from lockstep.errors import UserError
from lockstep.world.world import World

DEFAULT_BUCKET_BYTES = 4 * 2**20


class TreeEngine:
    can_replay = True

    def __init__(
        self,
        world: World,
        lanes: Lanes,
        models: Sequence[nn.Module],
        *,
        buffer_rules: Mapping[str, Rule],
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        requests: Requests | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        """`sharding`: every rank gets its own stretches of the gradients alone. [Note: zero]"""
        for model in models:
            _refuse_collectives_in_forward(model)
        self.world = world
        self.requests = Requests() if requests is None else requests
        self._models = models
        self.lanes = lanes
        self.own_lanes = lanes.of(world.rank)
        self.last_lane = self.own_lanes[-1]
        self.channel = Channel(world) if world.size > 1 else None
        self.carrier = world.device if self.channel is None else self.channel.carrier
        self.exchange = None if self.channel is None else choose_exchange(self.channel, world.rank, lanes)
        self.buffers = LaneBuffers(models, buffer_rules)
        self._bucket_bytes = bucket_bytes
        self.sharding = sharding if self.channel is not None else None
        self._all_parameters = all_parameters(models)
        self._trees: dict[tuple[int, ...], list[GradientTree]] = {}

    def start_pass(self, parameters: Sequence[Parameter], *, divide_late: bool = False) -> "TreePass":  # noqa: ARG002
        """Gradients of these parameters; those of other parameters are left alone."""
        return TreePass(self, parameters, inputs_for(parameters, self._all_parameters))

    def trees(self, parameters: Sequence[Parameter], num_terms: int) -> list[GradientTree]:
        """A tree for each term of the loss."""
        trees = self._trees.setdefault(tuple(map(id, parameters)), [])
        while len(trees) < num_terms:
            trees.append(self._new_tree(parameters))
        return trees[:num_terms]

    def name_of(self, parameter: Parameter) -> str:
        names = (name for model in self._models for name, other in model.named_parameters() if other is parameter)
        return next(names, "(unnamed)")

    def holders(self, parameters: Sequence[Parameter]) -> Sequence[Parameter]:
        """Whose `.grad` holds what this rank gets of these parameters' gradients."""
        return parameters if self.sharding is None else [self.sharding.shards[parameter] for parameter in parameters]

    def reduced(self, parameters: Sequence[Parameter]) -> Reduced:
        if self.sharding is None or self.channel is None:
            return WholeGradients(parameters)
        return ShardedSums(parameters, self.sharding, self.channel)

    def after_update(self, parameters: Sequence[Parameter]) -> None:
        concerned = set(parameters)
        for tree, *_ in self._trees.values():  # the same parameters may be in several, for passes of other kinds
            if isinstance(tree, ShardedGradients):
                tree.share_parameters(concerned)

    def travel(self, *, timed: bool) -> Travel:
        if self.channel is None:
            return Travel(0.0)
        return Travel(self.channel.busy_s(timed=timed), self.channel.bytes_sent)

    def close(self, *, abandon: bool = False) -> None:
        for trees in self._trees.values():
            for tree in trees:
                tree.close()
        self._trees = {}
        if self.channel is not None:
            self.channel.close(abandon=abandon)

    def _new_tree(self, parameters: Sequence[Parameter]) -> GradientTree:
        if self.channel is None or self.exchange is None:
            return OneRankGradients(parameters, self.own_lanes)
        if self.sharding is not None:
            return ShardedGradients(self.sharding, parameters, self.own_lanes, self.channel, self.exchange)
        buckets = make_buckets(parameters, self._bucket_bytes)
        members = [[parameters[index] for index in bucket.indices] for bucket in buckets]
        return ManyRanksGradients(members, self.own_lanes, buckets, self.channel, self.exchange)


class TreePass:
    """One pass over this rank's lanes."""

    def __init__(self, engine: TreeEngine, parameters: Sequence[Parameter], inputs: Sequence[Parameter] | None) -> None:
        self._engine = engine
        self._parameters = parameters
        self._inputs = inputs
        self._table = LaneTable(engine.lanes.count, engine.carrier)
        self._table_job: Job | None = None
        self._buffers_job: Job | None = None
        self._trees: list[GradientTree] = []  # one for each term of the loss, once that is known
        self._passes = BackwardPasses()
        self._versions = [parameter._version for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        engine.buffers.begin()

    def open_lane(self, lane: int, size: int) -> None:
        self._lane = lane
        self._size = size
        self._passes.open_lane()
        self._table.add_lane(lane, size)
        self._engine.buffers.open_lane()

    def backward(self, terms: Terms, *, more: bool, retain_graph: bool = False) -> None:
        is_only = self._passes.add(len(terms), more=more)
        self._table.record(self._lane, terms)
        self._trees = self._trees or self._begin_trees(len(terms))
        is_last = not more and self._lane == self._engine.last_lane
        if is_last:
            self._share_table()
        for number, (tree, (loss_sum, _)) in enumerate(zip(self._trees, terms.values(), strict=True)):
            if self._passes.count == 1:
                require_no_gradients(self._parameters)
                tree.open_lane(self._lane, one_pass=is_only)
            if is_last:
                tree.overlap(self._scale(number))
            retains = retain_graph or number < len(self._trees) - 1
            run_backward([loss_sum], [torch.ones_like(loss_sum)], retain_graph=retains, inputs=self._inputs)
            if not more:
                tree.close_lane()
            if is_last:
                # At once, because another term's gradients must not leave before it: on some rank they might not.
                tree.send(self._scale(number))

    def close_lane(self) -> None:
        self._passes.close_lane()
        self._engine.buffers.close_lane(self._lane, self._size)

    def end(self) -> None:
        require_no_gradients(self._parameters)
        if self._versions != [parameter._version for parameter in self._parameters]:
            self._name_the_changed_parameter()
        self._engine.buffers.check()
        self._share_table()
        if self._engine.channel is None or self._engine.exchange is None:
            return
        for number, tree in enumerate(self._all_trees()):
            tree.send(self._scale(number))
        if self._engine.buffers.any_managed:
            self._buffers_job = self._engine.channel.submit(self._exchange_buffers)

    def finish(self) -> None:
        holders = self._engine.holders(self._parameters)
        for number, tree in enumerate(self._all_trees()):
            others = [holder.grad for holder in holders] if number else None
            tree.finish(self._scale(number))
            if others is not None:
                gradients = add_gradients(others, [holder.grad for holder in holders])
                for holder, gradient in zip(holders, gradients, strict=True):
                    holder.grad = gradient
        if self._buffers_job is not None:
            self._buffers_job.result()
        elif self._engine.channel is None:
            self._engine.buffers.combine()

    def loss(self) -> Tensor:
        return self._table.loss()

    def loss_sums(self) -> list[Tensor]:
        return self._table.loss_sums()

    def nonfinite_lanes(self) -> list[int]:
        return self._table.nonfinite_lanes()

    def _name_the_changed_parameter(self) -> NoReturn:
        changed = next(
            parameter
            for parameter, version in zip(self._parameters, self._versions, strict=True)
            if parameter._version != version
        )
        raise UserError(
            f"the forward pass changes the parameter {self._engine.name_of(changed)}, so later lanes would see another "
            "model than earlier ones (an Embedding with max_norm?): use determinism=fast with parallel=ddp"
        )

    def _share_table(self) -> None:
        """Ask for the other ranks' sums and counts; before the first gradients leave, because those wait for them."""
        channel = self._engine.channel
        if channel is not None and self._table_job is None:
            self._table_job = channel.submit(
                self._exchange_table, self._table.local(self._engine.requests.pass_on()), channel.group
            )

    def _all_trees(self) -> list[GradientTree]:
        if not self._trees:
            # No lane was run here: the other ranks know how many terms the loss has.
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

    def _exchange_table(self, rows: Tensor, group: dist.ProcessGroup | None) -> None:
        dist.all_reduce(rows, group=group)
        self._table.complete(rows)
        self._engine.requests.hear(self._table.asked)
        if rows.is_cpu:  # reading it would make a GPU wait, in every step
            self._table.check_names()

    def _exchange_buffers(self) -> None:
        engine = self._engine
        assert engine.channel is not None and engine.exchange is not None
        engine.buffers.exchange(engine.channel, engine.exchange, engine.lanes, self._table.sizes)


def _refuse_collectives_in_forward(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise UserError(
                f"{name} is a SyncBatchNorm, whose statistics follow the number of processes: "
                "use BatchNorm (lanes give it a fixed batch), or determinism=fast with parallel=ddp"
            )
