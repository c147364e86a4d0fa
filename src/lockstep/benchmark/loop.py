"""A loop that trains, as the measuring sees it; and the one that all but lockstep's share: forward, backward, step."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.data import Dataset

from lockstep.benchmark.workloads import Workload
from lockstep.world.world import World

SEED = 0


class Setting(NamedTuple):
    """What every loop is given."""

    work: Workload  # its data is on the device, and a multiple of the batch
    world: World
    batch: int  # over all processes
    lanes: int | None  # of lockstep mode

    @property
    def share(self) -> int:
        """This process's part of a batch, where all have the same."""
        return self.batch // self.world.size


class Loop(Protocol):
    is_exact: bool  # only with kernels that repeat their bits

    def advance(self, steps: int) -> None: ...

    def weights(self) -> Mapping[str, Tensor]:
        """As they are now, by the model's own names for them."""
        ...

    def close(self) -> None: ...


def make_optimizer(parameters: Iterable[Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


class PlainLoop:
    """What people write by hand, and what their libraries leave to them."""

    is_exact = False

    def __init__(
        self,
        model: nn.Module,
        called: Callable[..., Any],
        optimizer: Any,
        batches: Iterator[Sequence[Tensor]],
        loss_sum: Callable[..., tuple[Tensor, int]],
        backward: Callable[[Tensor], Any] = Tensor.backward,
    ) -> None:
        """`called`: the model as its library wants it to be called."""
        self._model = model
        self._called = called
        self._optimizer = optimizer
        self._batches = batches
        self._loss_sum = loss_sum
        self._backward = backward

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            loss_sum, count = self._loss_sum(self._called, next(self._batches))
            self._backward(loss_sum / count)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)

    def weights(self) -> Mapping[str, Tensor]:
        return self._model.state_dict()

    def close(self) -> None:
        pass


class Rows(Dataset[Any]):
    """Tensors' rows for a DataLoader, a whole batch at a time: one by one, that would be most of a step."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors[0])

    def __getitem__(self, index: int) -> list[Tensor]:
        return [tensor[index] for tensor in self._tensors]

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        rows = torch.tensor(indices, device=self._tensors[0].device)
        return [tensor.index_select(0, rows) for tensor in self._tensors]


def as_they_are(batch: list[Tensor]) -> list[Tensor]:
    """To collate what is a batch already."""
    return batch


def endless(loader: Iterable[Any], start_epoch: Callable[[int], None] = lambda _: None) -> Iterator[Any]:
    """A loader's batches, epoch after epoch."""
    epoch = 0
    while True:
        start_epoch(epoch)
        yield from loader
        epoch += 1
