"""The interface of a parallel strategy, and those with the whole model on every rank: single, dp, ddp."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lockstep.data.evaluation_loader import EvaluationLoader
from lockstep.data.loader_factory import Loader
from lockstep.data.torch_loader import TorchLoader
from lockstep.engine.compiled_models import uncompiled
from lockstep.engine.compression import Compressor, Traffic
from lockstep.engine.ddp_reducer import DdpReducer
from lockstep.engine.engine import Engine
from lockstep.engine.fast_engine import FastEngine
from lockstep.engine.loss_table import ControlFlags
from lockstep.engine.one_lane_engine import OneLaneEngine
from lockstep.engine.tree_engine import TreeEngine
from lockstep.engine.zero_sharding import ZeroSharding
from lockstep.errors import UserError
from lockstep.train.resume.progress import length_of_run
from lockstep.train.step_options import StepOptions
from lockstep.world.collectives import broadcast
from lockstep.world.world import World


class ParallelStrategy:
    """How a run is spread over ranks. By default every rank has all parameters, gradients and optimizer state."""

    name: str
    is_exact: ClassVar[bool] = True  # whether lockstep mode's bits do not depend on the number of ranks
    compresses: ClassVar[bool] = False  # whether gradients can be sent compressed, in fast mode
    needs_equal_lanes: ClassVar[bool] = False  # whether all ranks must run equally many lanes in every step

    def __init__(self, world: World, options: StepOptions, *, keep_gradients: bool = False) -> None:  # noqa: ARG002
        """`keep_gradients`: gradients must stay valid after the update, too."""
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
        """This rank's place among the ranks with their own samples."""
        return self.world

    @property
    def can_be_replaced(self) -> bool:
        """Whether another strategy could still take over, because there is nothing to undo."""
        return not self.has_begun

    def check(self) -> None:
        """Raise if the options cannot work. Called before there is a model."""

    def check_fit(self, optimizers: Collection[Optimizer], loader: Loader) -> None:  # noqa: ARG002
        """Raise if the optimizers or the loader do not fit. Called before training begins."""
        if self.needs_equal_lanes and isinstance(loader, TorchLoader) and loader.joins:
            raise UserError(
                f"uneven=join lets a rank continue without samples, but under parallel={self.name} all ranks run the "
                "model together: omit it (an epoch then ends when the first rank runs out), or use parallel=ddp"
            )

    def place(self, model: nn.Module) -> None:
        """Put the module on this rank's device, with rank 0's weights and buffers."""
        model.to(self.world.device)
        if self.world.size > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                take_from_rank_0(tensor, self.world.device)

    def to_call(self, model: nn.Module) -> nn.Module:
        """Return what a loss calls instead of a placed module. Its parameters are the module's own."""
        return model

    def adopt(self, optimizer: Optimizer) -> None:
        """Adapt an optimizer that may have been made before its model was placed."""

    def share_evaluation(self, loader: EvaluationLoader) -> EvaluationLoader:
        """Return the loader with the chunks that this rank evaluates."""
        return loader

    def settle(self) -> None:
        """Clean up after forward passes that no backward pass followed."""

    def begin(self, optimizers: Iterable[Optimizer]) -> None:  # noqa: ARG002
        """Prepare optimizers before training begins or resumes. Called again for optimizers that are added later."""
        self.has_begun = True

    def make_engine(self, loader: Loader, models: Sequence[nn.Module], control_flags: ControlFlags) -> Engine:
        """Return the engine that computes gradients for this loader's lanes."""
        if loader.lanes.count == 1:
            return OneLaneEngine(self.world, models)
        if self.options.determinism == "fast" or not loader.exact:
            if self._compressor is not None:
                self._compressor.open(length_of_run(loader))
            return FastEngine(
                self.world,
                loader.lanes,
                models,
                make_reducer=self._make_reducer,
                control_flags=control_flags,
                compressor=self._compressor,
                uneven=isinstance(loader, TorchLoader) and loader.joins,
            )
        return self.make_tree_engine(loader, models, control_flags)

    def make_tree_engine(
        self,
        loader: Loader,
        models: Sequence[nn.Module],
        control_flags: ControlFlags,
        sharding: ZeroSharding | None = None,
    ) -> Engine:
        """Return the engine of lockstep mode. `sharding`: leaves each rank the gradients of its own shards only."""
        return TreeEngine(
            self.world,
            loader.lanes,
            models,
            buffer_rules=self.options.buffers,
            bucket_bytes=self.options.bucket_bytes,
            control_flags=control_flags,
            sharding=sharding,
        )

    def _make_reducer(self, parameters: Sequence[Parameter]) -> DdpReducer:
        unused = self.options.find_unused_parameters
        return DdpReducer(parameters, self.world, find_unused_parameters=unused, compressor=self._compressor)

    @property
    def traffic(self) -> Traffic | None:
        """The bytes sent, if gradients are compressed."""
        return None if self._compressor is None else self._compressor.traffic

    def compression_value(self, names: Mapping[Parameter, str]) -> dict[str, Any] | None:
        """Return the compressor's state for a checkpoint, by the parameters' names; None if there is none."""
        return None if self._compressor is None else self._compressor.state_dict(names)

    def load_compression(self, value: Mapping[str, Any], names: Mapping[Parameter, str]) -> None:
        """Restore the compressor's state from a checkpoint."""
        if self._compressor is not None:
            self._compressor.load_state_dict(value, names)

    def optimizer_here(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer that steps, and holds the state, on this rank."""
        return optimizer

    def holder(self, parameter: Parameter) -> Parameter:
        """Return what that optimizer has in a parameter's place."""
        return parameter

    def to_save(self, parameter: Parameter, value: Any) -> Any:  # noqa: ARG002
        """Return an entry of a parameter's optimizer state, or its gradient, as it is saved: whole, or as a shard."""
        return value

    def to_load(self, parameter: Parameter, key: str, value: Any) -> Any:  # noqa: ARG002
        """Return this rank's part of an entry of optimizer state that was saved under this key."""
        return value

    def whole(self, parameter: Parameter, value: Any) -> Any:  # noqa: ARG002
        """Return an entry of state, or a gradient, in full. All ranks must call it together."""
        return value

    def step(self, optimizer: Optimizer) -> None:
        """Let an optimizer step on what this rank holds."""
        optimizer.step()


class Ddp(ParallelStrategy):
    """`parallel: ddp`: every rank computes the gradients of its own lanes, and makes the same update."""

    name = "ddp"
    compresses = True


class Single(ParallelStrategy):
    """`parallel: single`: one process."""

    name = "single"
    compresses = True  # there is nothing to send

    def check(self) -> None:
        require_one_process(self.world, "parallel=single")


class DataParallel(ParallelStrategy):
    """`parallel: dp`: torch's DataParallel, one process for all visible GPUs.

    It cuts every batch into a piece for each GPU, so the bits depend on their number. With at most one GPU it is the
    same as `single`.
    """

    name = "dp"

    def check(self) -> None:
        require_one_process(self.world, "parallel=dp (or use_ddp=false)")
        if self._num_devices() > 1 and self.options.determinism == "lockstep":
            raise UserError(
                f"parallel=dp cuts every lane into pieces for {self._num_devices()} GPUs, so the bits depend on their "
                "number: set determinism=fast, use parallel=single, or start a process for each GPU (-n auto)"
            )
        if self._num_devices() > 1 and self.options.activation_checkpointing is not None:
            refuse_activation_checkpointing()

    def to_call(self, model: nn.Module) -> nn.Module:
        return nn.DataParallel(model) if self._num_devices() > 1 else model

    def _num_devices(self) -> int:
        return torch.cuda.device_count() if self.world.device.type == "cuda" else 1


def refuse_activation_checkpointing() -> NoReturn:
    """Raise: DataParallel's copies of a module share its `__dict__`, and with it the original's `forward`."""
    raise UserError(
        "activation checkpointing does not work with parallel=dp on several GPUs, which copies the model every step: "
        "start a process for each GPU (-n auto)"
    )


def unwrapped(model: nn.Module) -> nn.Module:
    """Return a model without the wrappers of torch's DataParallel and DistributedDataParallel."""
    while isinstance(model, nn.DataParallel | DistributedDataParallel):
        model = model.module
    if isinstance(inside := uncompiled(model), nn.DataParallel | DistributedDataParallel):
        raise UserError(
            f"the compiled model contains a {type(inside).__name__}, which the run replaces: compile the bare model, "
            "run.prepare(torch.compile(model))"
        )
    return model


def require_one_process(world: World, setting: str) -> None:
    """Raise if there are several processes."""
    if world.size > 1:
        raise UserError(f"{setting} is for one process, but {world.size} were started: omit -n, or use parallel=ddp")


@torch.no_grad()
def take_from_rank_0(tensor: Tensor, device: torch.device) -> None:
    """Replace a tensor by rank 0's. Sent as bytes on `device`: a backend may not support every dtype."""
    if tensor.numel():
        flat = tensor.detach().to(device).contiguous().reshape(-1)
        tensor.copy_(broadcast(flat.view(torch.uint8)).view(tensor.dtype).view(tensor.shape))
