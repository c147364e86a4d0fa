"""The backward pass that all engines use: autograd's own, with a scale for each loss."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from lockstep.engine.engine import run_backward


def test_scaled_losses_add_up_in_the_given_parameters_only() -> None:
    first, second = (torch.nn.Parameter(torch.tensor([2.0, 3.0])) for _ in range(2))
    losses = [(first * second).sum(), first.sum()]
    run_backward(losses, [torch.tensor(10.0), torch.tensor(0.5)], inputs=[first])
    assert first.grad is not None and first.grad.tolist() == [20.5, 30.5]
    assert second.grad is None


def test_a_retained_graph_can_be_used_again() -> None:
    weight = torch.nn.Parameter(torch.tensor(3.0))
    loss = weight.square()
    run_backward([loss], [torch.ones(())], retain_graph=True)
    run_backward([loss], [torch.ones(())])
    assert weight.grad is not None and weight.grad.item() == 12.0


class Watched(Tensor):
    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        cls.seen.append(getattr(func, "__name__", ""))
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_a_tensor_subclass_goes_through_torch_autograd_backward() -> None:
    weight = torch.nn.Parameter(torch.tensor(3.0))
    loss = weight.square().as_subclass(Watched)  # type: ignore[no-untyped-call]
    Watched.seen.clear()
    run_backward([loss], [torch.ones(())])
    assert "backward" in Watched.seen
    assert weight.grad is not None and weight.grad.item() == 6.0
