"""`parallel: fsdp` and `parallel: {data: n, shard: n, tensor: n}`: FSDP and tensor parallelism. [Note: mesh]

Torch's `fully_shard` shards each parameter along its first dimension over the axis `shard`, gathers a unit's parameters
while it computes, and reduces gradients over `data` and `shard`. Parameters become DTensors, and an optimizer steps on
their local shards.
"""

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep.config.argument_checks import require_count, require_known
from lockstep.data.evaluation_loader import EvaluationLoader
from lockstep.data.loader_factory import Loader
from lockstep.data.torch_loader import TorchLoader
from lockstep.engine.compiled_models import named_parameters
from lockstep.engine.engine import Engine
from lockstep.engine.loss_table import ControlFlags
from lockstep.engine.mesh_engine import FsdpUnit, MeshEngine, MeshPosition
from lockstep.errors import UserError
from lockstep.train.step_options import StepOptions
from lockstep.train.strategies.fsdp_units import choose_units
from lockstep.train.strategies.parallel_strategy import take_from_rank_0
from lockstep.train.strategies.sharded_optimizer import ShardedOptimizerStrategy
from lockstep.train.strategies.tensor_plan import TensorPlan
from lockstep.world.dtensor import gather_full_tensor, is_dtensor, local_shard_of, local_tensor, shard_to_save
from lockstep.world.world import World


class MeshSizes(NamedTuple):
    """How many ranks lie along each axis. Ranks are numbered along the last axis first.

    So the ranks of a tensor group are neighbours.
    """

    data: int  # replicas of the model
    shard: int  # ranks over which every parameter is sharded
    tensor: int  # ranks over which single layers are split

    @property
    def num_data_ranks(self) -> int:
        """The number of ranks with their own samples."""
        return self.data * self.shard

    def __str__(self) -> str:
        return "{" + ", ".join(f"{axis}: {size}" for axis, size in self._asdict().items()) + "}"


def mesh_sizes(parallel: str | Mapping[str, int | None], num_ranks: int) -> MeshSizes:
    """Return the sizes that `parallel` asks for. If one of data and shard is missing, it is computed; the rest is 1."""
    given = {} if isinstance(parallel, str) else {axis: size for axis, size in parallel.items() if size is not None}
    require_known("parallel has no axis", given, MeshSizes._fields)
    for axis, size in given.items():
        require_count(f"parallel.{axis}", size)
    missing = ["shard"] if isinstance(parallel, str) else [axis for axis in ("data", "shard") if axis not in given]
    known = prod(given.values())
    if len(missing) == 1 and num_ranks % known == 0:
        given[missing[0]] = num_ranks // known
    sizes = MeshSizes(*(given.get(axis, 1) for axis in MeshSizes._fields))
    if prod(sizes) != num_ranks:
        product = " × ".join(f"{axis} {size}" for axis, size in sizes._asdict().items())
        raise UserError(
            f"parallel: {product} = {prod(sizes)} processes, but {num_ranks} were started: "
            f"make the product {num_ranks}, or start {prod(sizes)}"
        )
    return sizes


class Mesh(ShardedOptimizerStrategy):
    """Shards parameters, gradients and optimizer state over a device mesh."""

    name = "fsdp"
    is_exact = False
    needs_equal_lanes = True

    def __init__(self, world: World, options: StepOptions, *, keep_gradients: bool = False) -> None:
        super().__init__(world, options, keep_gradients=keep_gradients)
        self._keep_gradients = keep_gradients
        self._shards: dict[Parameter, Parameter] = {}
        self._units: list[FsdpUnit] = []
        # By id, because tensors compare element by element.
        self._replaced: dict[int, tuple[weakref.ref[Parameter], Parameter]] = {}

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
        self._shards |= {p: Parameter(local_tensor(p)) for p in parameters if is_dtensor(p)}

    def part_of(self, parameter: Parameter, whole: Tensor) -> Tensor:
        # An optimizer may have made its state for the sharded parameter.
        return local_tensor(whole) if is_dtensor(whole) else whole[local_shard_of(parameter).slices]

    def place(self, model: nn.Module) -> None:
        if self.world.size == 1:
            self._plan.modules(model)  # checks what can be checked on one rank
            super().place(model)
            return
        _check_parameters(model)
        # The model need not fit on the device: `fully_shard` moves one unit after another there.
        for tensor in (*model.parameters(), *model.buffers()):
            take_from_rank_0(tensor, self.world.device)
        before = {name: weakref.ref(p) for name, p in model.named_parameters(remove_duplicate=False)}
        self._plan.apply(model, self._mesh["tensor"])
        modules = choose_units(model, self.options.fsdp)
        _check_types(model, modules)
        for module in modules:
            self._shard(module)
        reduce_unused = getattr(model, "set_reduce_scatter_unused_params", None)  # not in every torch version
        if self.options.find_unused_parameters and reduce_unused is not None:
            reduce_unused(True)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if (old := before[name]()) is not None:  # otherwise nothing refers to it any more
                self._replaced[id(old)] = (before[name], parameter)
        self._units += [
            FsdpUnit(module, own) for module, own in zip(modules, _parameters_of_units(modules), strict=True)
        ]

    def adopt(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group["params"] = [self._replacement(parameter) for parameter in group["params"]]
        for parameter in list(optimizer.state):
            if self._replacement(parameter) is not parameter:
                optimizer.state[self._replacement(parameter)] = optimizer.state.pop(parameter)

    def settle(self) -> None:
        for unit in self._units:
            unit.module.reshard()

    def share_evaluation(self, loader: EvaluationLoader) -> EvaluationLoader:
        self.settle()  # weights gathered by an earlier forward pass may be outdated
        return loader.with_equal_chunks(self.data_world, counts=self._copy == 0)

    def check_fit(self, optimizers: Collection[Optimizer], loader: Loader) -> None:
        super().check_fit(optimizers, loader)
        self._plan.check_matched()
        if self.world.size > 1:
            require_equal_work(loader, self.data_world, self.name, self.sizes.tensor)

    def make_engine(self, loader: Loader, models: Sequence[nn.Module], control_flags: ControlFlags) -> Engine:
        if self.world.size == 1:
            return super().make_engine(loader, models, control_flags)
        position = MeshPosition(self.data_world.rank, self._copy, self.sizes.tensor)
        return MeshEngine(self.world, loader.lanes, models, self._units, position, control_flags=control_flags)

    def to_save(self, parameter: Parameter, value: Any) -> Any:
        return shard_to_save(value, local_shard_of(parameter)) if self.is_part(parameter, value) else value

    def whole(self, parameter: Parameter, value: Any) -> Any:
        return gather_full_tensor(value, local_shard_of(parameter)) if self.is_part(parameter, value) else value

    def step(self, optimizer: Optimizer) -> None:
        shards = {p: self._shards[p] for group in optimizer.param_groups for p in group["params"] if p in self._shards}
        for parameter, shard in shards.items():
            shard.grad = None if parameter.grad is None else local_tensor(parameter.grad)
        super().step(optimizer)
        if not self._keep_gradients:
            for shard in shards.values():
                shard.grad = None

    @property
    def _copy(self) -> int:
        """This rank's number among those that run the same lanes."""
        return self.world.rank % self.sizes.tensor

    def _replacement(self, parameter: Any) -> Any:
        """Return the DTensor that replaced a parameter when its model was placed; else the parameter."""
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

        ranks = torch.arange(self.world.size).view(self.sizes)
        groups = [_group_along(ranks, axis, self.world) for axis in range(ranks.dim())]
        kind, names = self.world.device.type, self.sizes._fields
        return DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=names)


def _group_along(ranks: Tensor, axis: int, world: World) -> Any:
    """Return the process group of the ranks that differ from this one along one axis only."""
    size = ranks.shape[axis]
    if size == world.size:
        return dist.group.WORLD
    lines = ranks.movedim(axis, -1).reshape(-1, size).tolist()
    timeout = timedelta(seconds=world.timeout_s)
    group, _ = dist.new_subgroups_by_enumeration(lines, timeout=timeout)  # type: ignore[no-untyped-call]
    return group


def _check_parameters(model: nn.Module) -> None:
    for name, parameter in named_parameters(model):
        if is_dtensor(parameter):
            raise UserError(
                f"{name} belongs to a model that is already prepared: prepare one module that contains both"
            )
        if parameter.dim() == 0:
            raise UserError(f"{name} is a scalar, which a mesh cannot shard: give it the shape (1,)")
        if not parameter.is_contiguous():
            raise UserError(
                f"{name} is not contiguous (channels_last?), so a mesh cannot shard it: use the default memory format"
            )


def _check_types(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    names = {parameter: name for name, parameter in named_parameters(model)}
    for own in _parameters_of_units(modules):
        first: dict[torch.dtype, str] = {}
        for parameter in sorted((p for p in own if p.requires_grad), key=names.__getitem__):
            first.setdefault(parameter.dtype, names[parameter])
        if len(first) > 1:
            found = " and ".join(f"{name} ({str(dtype).removeprefix('torch.')})" for dtype, name in first.items())
            raise UserError(
                f"{found} would be gathered together, but have different dtypes: separate them with fsdp.wrap"
            )


def _parameters_of_units(modules: Sequence[nn.Module]) -> list[frozenset[Parameter]]:
    """Return the parameters of each unit, without those of units inside it. Inner units come first."""
    taken: set[Parameter] = set()
    found = []
    for module in modules:
        found.append(frozenset(p for p in module.parameters() if p not in taken))
        taken |= found[-1]
    return found


def require_equal_work(loader: Loader, data_world: World, name: str, num_copies: int) -> None:
    """Raise unless all ranks run equally many forward passes: they contain collectives, so a rank with more would hang.

    `num_copies`: how many ranks run the same lanes.
    """
    shares, count = loader.lanes.shares, loader.lanes.count
    if len(shares) != data_world.size:
        raise UserError(
            f"parallel={name}: the loader was made for {len(shares)} processes, but {data_world.size} have their own "
            "samples: make it with run.loader(…)"
        )
    if len({len(share) for share in shares}) > 1:
        sizes = ", ".join(str(len(share)) for share in shares)
        raise UserError(
            f"parallel={name}: all processes must run equally many lanes, but lanes={count} on {len(shares)} makes "
            f"{sizes}: use a multiple of {len(shares)} lanes, and omit lanes_per_rank"
        )
    if isinstance(loader, TorchLoader):
        if num_copies > 1:
            raise UserError(
                f"parallel={name}: each group of {num_copies} processes must see the same samples, but this DataLoader "
                "orders its own: pass the data set to run.loader(…)"
            )
    elif loader.may_leave_lanes_empty:
        raise UserError(
            f"parallel={name}: tail={loader.tail} can leave lanes without samples, but all processes must run equally "
            "many: use tail=drop, or with a map-style data set tail=pad"
        )
