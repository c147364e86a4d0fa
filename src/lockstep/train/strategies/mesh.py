"""`parallel: fsdp` and `parallel: {data: n, shard: n, tensor: n}`: every rank has its part of the model. [Note: mesh]

Torch's `fully_shard` cuts each parameter along its first dimension over the axis `shard`, gathers a unit's parameters
while it computes, and sums gradients over `data` and `shard`. What torch calls a DTensor stands where the parameter
was. An optimizer steps on what is here of it.
"""

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep.data.evaluation import EvaluationLoader
from lockstep.data.foreign import Loader
from lockstep.engine.engine import Engine
from lockstep.engine.mesh_engine import MeshEngine, Place, Unit
from lockstep.engine.requests import Requests
from lockstep.errors import UserError
from lockstep.train.options import StepOptions
from lockstep.train.strategies.equal_work import require_equal_work
from lockstep.train.strategies.mesh_sizes import mesh_sizes
from lockstep.train.strategies.partial_steps import PartialSteps
from lockstep.train.strategies.strategy import take_from_rank_0
from lockstep.train.strategies.tensor_plan import TensorPlan
from lockstep.train.strategies.units import choose_units
from lockstep.world.boxes import as_shard, box_of, gathered, held, is_spread
from lockstep.world.world import World


class Mesh(PartialSteps):
    name = "fsdp"
    is_exact = False
    needs_equal_lanes = True

    def __init__(self, world: World, options: StepOptions, *, keep_gradients: bool = False) -> None:
        super().__init__(world, options, keep_gradients=keep_gradients)
        self._keep_gradients = keep_gradients
        self._shards: dict[Parameter, Parameter] = {}
        self._units: list[Unit] = []
        self._replaced: dict[int, tuple[weakref.ref[Parameter], Parameter]] = {}  # by id: tensors compare by element

    def check(self) -> None:
        self.sizes = mesh_sizes(self.options.parallel, self.world.size)
        if not isinstance(self.options.parallel, str):
            self.name = str(self.sizes)
        self._plan = TensorPlan(self.options.tensor_plan, self.sizes.tensor)

    @property
    def can_be_replaced(self) -> bool:
        return not self._units

    @property
    def data_world(self) -> World:
        return replace(self.world, rank=self.world.rank // self.sizes.tensor, size=self.sizes.num_data_ranks)

    @property
    def shards(self) -> Mapping[Parameter, Parameter]:
        return self._shards

    def cut(self, parameters: Sequence[Parameter]) -> None:
        self._shards |= {p: Parameter(held(p)) for p in parameters if is_spread(p)}

    def part_of(self, parameter: Parameter, whole: Tensor) -> Tensor:
        # An optimizer may have made its state for the parameter as it lies now.
        return held(whole) if is_spread(whole) else whole[box_of(parameter).slices]

    def place(self, model: nn.Module) -> None:
        if self.world.size == 1:
            self._plan.modules(model)  # as far as it can be checked here
            super().place(model)
            return
        _check_parameters(model)
        # Not all of it on the device at once: `fully_shard` brings one unit after another there.
        for tensor in (*model.parameters(), *model.buffers()):
            take_from_rank_0(tensor, self.world.device)
        before = {name: weakref.ref(p) for name, p in model.named_parameters(remove_duplicate=False)}
        self._plan.apply(model, self._mesh["tensor"])
        modules = choose_units(model, self.options.fsdp)
        _check_types(model, modules)
        for module in modules:
            self._shard(module)
        share_unused = getattr(model, "set_reduce_scatter_unused_params", None)  # not in every version of torch
        if self.options.find_unused_parameters and share_unused is not None:
            share_unused(True)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if (old := before[name]()) is not None:  # else nobody can ask for it any more
                self._replaced[id(old)] = (before[name], parameter)
        self._units += [Unit(module, own) for module, own in zip(modules, _own_parameters(modules), strict=True)]

    def adopt(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group["params"] = [self._now(parameter) for parameter in group["params"]]
        for parameter in list(optimizer.state):
            if self._now(parameter) is not parameter:
                optimizer.state[self._now(parameter)] = optimizer.state.pop(parameter)

    def settle(self) -> None:
        for unit in self._units:
            unit.module.reshard()

    def share_evaluation(self, loader: EvaluationLoader) -> EvaluationLoader:
        self.settle()  # the weights may have changed since somebody's last forward pass
        return loader.equally(self.data_world, counts=self._copy == 0)

    def check_fit(self, optimizers: Collection[Optimizer], loader: Loader) -> None:
        super().check_fit(optimizers, loader)
        self._plan.check_matched()
        if self.world.size > 1:
            require_equal_work(loader, self.data_world, self.name, self.sizes.tensor)

    def make_engine(self, loader: Loader, models: Sequence[nn.Module], requests: Requests) -> Engine:
        if self.world.size == 1:
            return super().make_engine(loader, models, requests)
        place = Place(self.data_world.rank, self._copy, self.sizes.tensor)
        return MeshEngine(self.world, loader.lanes, models, self._units, place, requests=requests)

    def to_save(self, parameter: Parameter, value: Any) -> Any:
        return as_shard(value, box_of(parameter)) if self.is_part(parameter, value) else value

    def whole(self, parameter: Parameter, value: Any) -> Any:
        return gathered(value, box_of(parameter)) if self.is_part(parameter, value) else value

    def step(self, optimizer: Optimizer) -> None:
        shards = {p: self._shards[p] for group in optimizer.param_groups for p in group["params"] if p in self._shards}
        for parameter, shard in shards.items():
            shard.grad = None if parameter.grad is None else held(parameter.grad)
        super().step(optimizer)
        if not self._keep_gradients:
            for shard in shards.values():
                shard.grad = None

    @property
    def _copy(self) -> int:
        """Its number among the ranks that run the same lanes."""
        return self.world.rank % self.sizes.tensor

    def _now(self, parameter: Any) -> Any:
        """What stands in the place of one that was there before its model was placed."""
        old, new = self._replaced.get(id(parameter), (None, parameter))
        return new if old is not None and old() is parameter else parameter

    def _shard(self, module: nn.Module) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        fsdp, on_gpu = self.options.fsdp, self.world.device.type == "cuda"
        offload = CPUOffloadPolicy(pin_memory=on_gpu) if fsdp.cpu_offload else OffloadPolicy()
        fully_shard(
            module,
            mesh=self._mesh["data", "shard"],
            reshard_after_forward=fsdp.reshard_after_forward,
            offload_policy=offload,
        )

    @cached_property
    def _mesh(self) -> Any:
        from torch.distributed.device_mesh import DeviceMesh

        places = torch.arange(self.world.size).view(self.sizes)
        groups = [_group_along(places, axis, self.world) for axis in range(places.dim())]
        kind, names = self.world.device.type, self.sizes._fields
        return DeviceMesh.from_group(groups, kind, mesh=places, mesh_dim_names=names)


def _group_along(places: Tensor, axis: int, world: World) -> Any:
    """Of the ranks that differ from this one along an axis alone; with the world's own patience."""
    size = places.shape[axis]
    if size == world.size:
        return dist.group.WORLD
    lines = places.movedim(axis, -1).reshape(-1, size).tolist()
    patience = timedelta(seconds=world.timeout_s)
    group, _ = dist.new_subgroups_by_enumeration(lines, timeout=patience)  # type: ignore[no-untyped-call]
    return group


def _check_parameters(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if is_spread(parameter):
            raise UserError(f"{name} belongs to a model that was prepared before: prepare what is around both, once")
        if parameter.dim() == 0:
            raise UserError(f"{name} has no dimension, so a mesh cannot cut it: give it the shape (1,)")
        if not parameter.is_contiguous():
            raise UserError(f"{name} is not contiguous (channels_last?), so a mesh cannot cut it: use its usual format")


def _check_types(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    names = {parameter: name for name, parameter in model.named_parameters()}
    for own in _own_parameters(modules):
        first: dict[torch.dtype, str] = {}
        for parameter in sorted((p for p in own if p.requires_grad), key=names.__getitem__):
            first.setdefault(parameter.dtype, names[parameter])
        if len(first) > 1:
            found = " and ".join(f"{name} ({str(dtype).removeprefix('torch.')})" for dtype, name in first.items())
            raise UserError(
                f"{found} would be gathered together, and are of different types: tell them apart by fsdp.wrap"
            )


def _own_parameters(modules: Sequence[nn.Module]) -> list[frozenset[Parameter]]:
    """Of units, inner ones before outer: each one's, less those of units inside."""
    taken: set[Parameter] = set()
    found = []
    for module in modules:
        found.append(frozenset(p for p in module.parameters() if p not in taken))
        taken |= found[-1]
    return found
