"""The training loops that `lockstep bench` times: hand-written, lockstep's own, Accelerate's and Fabric's."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lockstep.bench.bench_models import Workload
from lockstep.bench.contenders import HAND_WRITTEN, fewest_lanes
from lockstep.train.run import Run
from lockstep.world.world import World

SEED = 0
_ENDLESS = 10**9  # steps


class LoopSetup(NamedTuple):
    """The inputs from which every loop is built."""

    work: Workload  # its data is on the device, and a multiple of the batch
    world: World
    batch: int  # over all processes
    lanes: int | None  # in lockstep mode

    @property
    def local_batch(self) -> int:
        """This process's share of a batch; all processes have equal shares."""
        return self.batch // self.world.size


class BenchLoop(Protocol):
    """A training loop that can be advanced and timed."""

    is_deterministic: bool  # it must be timed with deterministic kernels

    def advance(self, steps: int) -> None:
        """Train for `steps` more steps."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Return the current weights, by the model's own parameter names."""
        ...

    def close(self) -> None:
        """Release the loop's resources."""
        ...


def make_optimizer(parameters: Iterable[Parameter]) -> Optimizer:
    """Create the optimizer that all loops use."""
    return torch.optim.AdamW(parameters, lr=1e-3)


# --- Hand-written, the baseline --------------------------------------------------------------------------------------


class PlainLoop:
    """Forward, backward, step: the loop that people write by hand; also used with Accelerate and Fabric."""

    is_deterministic = False

    def __init__(
        self,
        model: nn.Module,
        wrapped_model: Callable[..., Any],
        optimizer: Any,
        batches: Iterator[Sequence[Tensor]],
        loss_sum: Callable[..., tuple[Tensor, int]],
        backward: Callable[[Tensor], Any] = Tensor.backward,
    ) -> None:
        """`wrapped_model` is what the loop calls; `model` is what its weights are read from."""
        self._model = model
        self._wrapped_model = wrapped_model
        self._optimizer = optimizer
        self._batches = batches
        self._loss_sum = loss_sum
        self._backward = backward

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            loss_sum, count = self._loss_sum(self._wrapped_model, next(self._batches))
            self._backward(loss_sum / count)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)

    def weights(self) -> Mapping[str, Tensor]:
        return self._model.state_dict()

    def close(self) -> None:
        pass


def hand_written_loop(setup: LoopSetup) -> BenchLoop:
    """Plain torch with the fastest way to cut batches, and DistributedDataParallel on several processes."""
    return _plain_torch(setup, shuffled_batches(setup))


def dataloader_loop(setup: LoopSetup) -> BenchLoop:
    """Plain torch with a DataLoader, as most people write it."""
    world, rows = setup.world, BatchRows(setup.work.data.tensors)
    if world.size == 1:
        loader = DataLoader(rows, setup.batch, shuffle=True, collate_fn=_no_collate)
        return _plain_torch(setup, _repeat(loader))
    sampler: DistributedSampler[Any] = DistributedSampler(rows, world.size, world.rank, seed=SEED)
    loader = DataLoader(rows, setup.local_batch, sampler=sampler, collate_fn=_no_collate)
    return _plain_torch(setup, _repeat(loader, sampler.set_epoch))


def _plain_torch(setup: LoopSetup, batches: Iterator[Sequence[Tensor]]) -> BenchLoop:
    model = setup.work.make_model().to(setup.world.device)
    wrapped = model if setup.world.size == 1 else DistributedDataParallel(model, gradient_as_bucket_view=True)
    return PlainLoop(model, wrapped, make_optimizer(model.parameters()), batches, setup.work.loss_sum)


def shuffled_batches(setup: LoopSetup) -> Iterator[list[Tensor]]:
    """Yield this process's share of every batch, with one operation per tensor; all processes shuffle alike."""
    tensors = setup.work.data.tensors
    generator = torch.Generator().manual_seed(SEED)
    while True:
        order = torch.randperm(len(tensors[0]), generator=generator).to(tensors[0].device)
        for start in range(setup.world.rank * setup.local_batch, len(order), setup.batch):
            rows = order[start : start + setup.local_batch]
            yield [tensor.index_select(0, rows) for tensor in tensors]


class BatchRows(Dataset[Any]):
    """Rows of tensors, fetched a whole batch at a time: one by one would take most of a step."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors[0])

    def __getitem__(self, index: int) -> list[Tensor]:
        return [tensor[index] for tensor in self._tensors]

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        rows = torch.tensor(indices, device=self._tensors[0].device)
        return [tensor.index_select(0, rows) for tensor in self._tensors]


def _no_collate(batch: list[Tensor]) -> list[Tensor]:
    return batch  # `BatchRows` has already collated it


def _repeat(loader: Iterable[Any], start_epoch: Callable[[int], None] = lambda _: None) -> Iterator[Any]:
    """Yield a loader's batches, epoch after epoch."""
    epoch = 0
    while True:
        start_epoch(epoch)
        yield from loader
        epoch += 1


# --- Lockstep --------------------------------------------------------------------------------------------------------


class LockstepLoop:
    """A loop over `lockstep.Run`, as in a user's script."""

    def __init__(
        self,
        work: Workload,
        world: World,
        batch: int,
        lanes: int,
        make_optimizer: Callable[[Iterable[Parameter]], Optimizer],
        **options: Any,
    ) -> None:
        """`options` are those of `Run`."""
        self.is_deterministic = options.get("determinism", "lockstep") == "lockstep"
        self.run = Run(None, world, **options)
        self.model = self.run.prepare(work.make_model())
        self.optimizer = self.run.optimizer(self.model, make_optimizer)
        self._loss_sum = work.loss_sum
        self._steps = iter(self.run.steps(self.run.loader(work.data, batch, lanes=lanes), steps=_ENDLESS, finish=False))

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            step = next(self._steps)
            step.accumulate(self._loss_sum, self.model)
            step.update(self.optimizer)

    def weights(self) -> Mapping[str, Tensor]:
        return self.model.state_dict()

    def close(self) -> None:
        self.run.close()


def lockstep_loop(setup: LoopSetup) -> BenchLoop:
    """Lockstep mode, with the contender's number of lanes."""
    assert setup.lanes is not None
    return LockstepLoop(setup.work, setup.world, setup.batch, setup.lanes, make_optimizer, seed=SEED)


def fast_loop(setup: LoopSetup) -> BenchLoop:
    """Fast mode, with as few lanes as the processes can share."""
    lanes = fewest_lanes(setup.world.size)
    return LockstepLoop(setup.work, setup.world, setup.batch, lanes, make_optimizer, seed=SEED, determinism="fast")


# --- Other libraries, set up as their manuals recommend --------------------------------------------------------------


def accelerate_loop(setup: LoopSetup) -> BenchLoop:
    """Hugging Face Accelerate."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    accelerator = Accelerator(cpu=setup.world.device.type == "cpu")
    set_seed(SEED)
    model = setup.work.make_model()
    rows = BatchRows(setup.work.data.tensors)
    loader = DataLoader(rows, setup.local_batch, shuffle=True, collate_fn=_no_collate)
    wrapped, optimizer, loader = accelerator.prepare(model, make_optimizer(model.parameters()), loader)
    return PlainLoop(model, wrapped, optimizer, _repeat(loader), setup.work.loss_sum, accelerator.backward)


def fabric_loop(setup: LoopSetup) -> BenchLoop:
    """Lightning Fabric."""
    from lightning.fabric import Fabric

    world = setup.world
    strategy = "ddp" if world.size > 1 else "auto"
    fabric = Fabric(accelerator=world.device.type, strategy=strategy, devices=world.size)
    fabric.launch()
    fabric.seed_everything(SEED, verbose=False)
    model = setup.work.make_model()
    wrapped, optimizer = fabric.setup(model, make_optimizer(model.parameters()))
    rows = BatchRows(setup.work.data.tensors)
    loader = fabric.setup_dataloaders(DataLoader(rows, setup.local_batch, shuffle=True, collate_fn=_no_collate))
    return PlainLoop(model, wrapped, optimizer, _repeat(loader), setup.work.loss_sum, fabric.backward)


LOOPS: dict[str, Callable[[LoopSetup], BenchLoop]] = {
    HAND_WRITTEN: hand_written_loop,
    "dataloader": dataloader_loop,
    "lockstep": lockstep_loop,
    "fast": fast_loop,
    "accelerate": accelerate_loop,
    "fabric": fabric_loop,
}
