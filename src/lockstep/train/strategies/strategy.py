"""What a run asks of the way it is spread over ranks. As it stands here, every rank has everything."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lockstep.config.duration import RunLength
from lockstep.data.evaluation import EvaluationLoader
from lockstep.data.foreign import ForeignLoader, Loader
from lockstep.engine.compression import Compressor, Traffic
from lockstep.engine.engine import Engine
from lockstep.engine.fast_engine import FastEngine
from lockstep.engine.one_lane_engine import OneLaneEngine
from lockstep.engine.replicas import Replicas
from lockstep.engine.requests import Requests
from lockstep.engine.tree_engine import TreeEngine
from lockstep.errors import UserError
from lockstep.train.options import StepOptions
from lockstep.world.collectives import broadcast
from lockstep.world.world import World


class Strategy:
    name: str
    is_exact: ClassVar[bool] = True  # the bits do not follow the number of ranks
    compresses: ClassVar[bool] = False  # can gradients travel compressed, in fast mode?
    needs_equal_lanes: ClassVar[bool] = False  # must all ranks run equally many, in every step?

    def __init__(self, world: World, options: StepOptions, *, keep_gradients: bool = False) -> None:  # noqa: ARG002
        """`keep_gradients`: somebody wants to see them after an update, too."""
        self.world = world
        self.options = options
        self.has_begun = False
        compression = options.compression
        self._compressor = None
        if compression.kind != "none" and world.size > 1:
            self._compressor = Compressor(compression, world, seed=options.seed)
        self.check()

    @property
    def data_world(self) -> World:
        """This rank's place among those that have samples of their own."""
        return self.world

    @property
    def can_be_replaced(self) -> bool:
        """Nothing that it has done so far would have to be undone for another one."""
        return not self.has_begun

    def check(self) -> None:
        """Whatever can be known to be wrong before there is a model."""

    def check_fit(self, optimizers: Collection[Optimizer], loader: Loader) -> None:  # noqa: ARG002
        """Whatever can be known to be wrong before training begins."""
        if self.needs_equal_lanes and isinstance(loader, ForeignLoader) and loader.joins:
            raise UserError(
                f"uneven=join lets a rank go on without samples, and under parallel={self.name} all ranks run the "
                "model together: leave it away (an epoch then ends with the shortest rank's), or use parallel=ddp"
            )

    def place(self, model: nn.Module) -> None:
        """Put the module on this rank's device, with rank 0's weights and buffers."""
        model.to(self.world.device)
        if self.world.size > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                take_from_rank_0(tensor, self.world.device)

    def to_call(self, model: nn.Module) -> nn.Module:
        """What a loss is to call in the place of a module that was placed; its parameters are the module's own."""
        return model

    def adopt(self, optimizer: Optimizer) -> None:
        """One that may have been made for a model's parameters before the model was placed."""

    def share_evaluation(self, loader: EvaluationLoader) -> EvaluationLoader:
        """Before an evaluation: the chunks that this rank is to run."""
        return loader

    def settle(self) -> None:
        """Forward passes that no backward pass follows may leave something behind: put it in order."""

    def begin(self, optimizers: Iterable[Optimizer]) -> None:  # noqa: ARG002
        """Training is about to begin, or to go on from what is loaded next; more than once, with what is new."""
        self.has_begun = True

    def make_engine(self, loader: Loader, models: Sequence[nn.Module], requests: Requests) -> Engine:
        if loader.lanes.count == 1:
            return OneLaneEngine(self.world, models)
        if self.options.determinism == "fast" or not loader.exact:
            if self._compressor is not None:
                self._compressor.open(_length_of(loader))
            return FastEngine(
                self.world,
                loader.lanes,
                models,
                replicate=self._replicate,
                requests=requests,
                compressor=self._compressor,
                uneven=isinstance(loader, ForeignLoader) and loader.joins,
            )
        return self.make_tree_engine(loader, models, requests)

    def make_tree_engine(self, loader: Loader, models: Sequence[nn.Module], requests: Requests, **more: Any) -> Engine:
        return TreeEngine(
            self.world,
            loader.lanes,
            models,
            buffer_rules=self.options.buffers,
            bucket_bytes=self.options.bucket_bytes,
            requests=requests,
            **more,
        )

    def _replicate(self, parameters: Sequence[Parameter]) -> Replicas:
        unused = self.options.find_unused_parameters
        return Replicas(parameters, self.world, find_unused_parameters=unused, compressor=self._compressor)

    @property
    def traffic(self) -> Traffic | None:
        """Where gradients travel compressed."""
        return None if self._compressor is None else self._compressor.traffic

    def compression_value(self, names: Mapping[Parameter, str]) -> dict[str, Any] | None:
        """What a checkpoint must hold of the way gradients travel, by the parameters' names."""
        return None if self._compressor is None else self._compressor.value(names)

    def load_compression(self, value: Mapping[str, Any], names: Mapping[Parameter, str]) -> None:
        if self._compressor is not None:
            self._compressor.load(value, names)

    def optimizer_here(self, optimizer: Optimizer) -> Optimizer:
        """The one that steps, and has the state, on this rank."""
        return optimizer

    def holder(self, parameter: Parameter) -> Parameter:
        """What that one has in the parameter's place."""
        return parameter

    def to_save(self, parameter: Parameter, value: Any) -> Any:  # noqa: ARG002
        """A piece of the parameter's optimizer state, or its gradient: whole, or as this rank's shard."""
        return value

    def to_load(self, parameter: Parameter, key: str, value: Any) -> Any:  # noqa: ARG002
        """What this rank needs of a piece of state that was saved under this key."""
        return value

    def whole(self, parameter: Parameter, value: Any) -> Any:  # noqa: ARG002
        """A piece of state, or a gradient, as if one rank had everything. All ranks ask together."""
        return value

    def step(self, optimizer: Optimizer) -> None:
        optimizer.step()


class Ddp(Strategy):
    """Every rank computes gradients of its own lanes, and makes the same update."""

    name = "ddp"
    compresses = True


class Single(Strategy):
    name = "single"
    compresses = True  # as much as there is

    def check(self) -> None:
        require_one_process(self.world, "parallel=single")


def _length_of(loader: Loader) -> RunLength:
    try:
        return RunLength(len(loader), loader.global_batch)
    except TypeError:
        return RunLength(None, loader.global_batch)


def unwrapped(model: nn.Module) -> nn.Module:
    """Without torch's own wrappers for several devices."""
    while isinstance(model, nn.DataParallel | DistributedDataParallel):
        model = model.module
    return model


def require_one_process(world: World, setting: str) -> None:
    if world.size > 1:
        raise UserError(f"{setting} is for one process, but {world.size} were started: leave -n away, or parallel=ddp")


@torch.no_grad()
def take_from_rank_0(tensor: Tensor, device: torch.device) -> None:
    """As bytes: a backend need not know every type, and wants its tensors contiguous, on its own device."""
    if tensor.numel():
        flat = tensor.detach().to(device).contiguous().reshape(-1)
        tensor.copy_(broadcast(flat.view(torch.uint8)).view(tensor.dtype).view(tensor.shape))
