"""Models that return their own loss."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.errors import UserError
from lockstep.train.model_loss import own_loss
from lockstep.train.trainer import Trainer

INPUTS = torch.linspace(-1, 1, 12).unsqueeze(1)


class Regression(nn.Module):
    def __init__(self, kind: str = "mapping") -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.kind = kind

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Any:
        assert targets is not None
        loss = F.mse_loss(self.layer(inputs), targets)
        if self.kind == "mapping":
            return {"loss": loss, "recon": inputs}
        return loss if self.kind == "bare" else SimpleNamespace(loss=loss)


@pytest.mark.parametrize("kind", ["mapping", "attribute", "bare"])
@pytest.mark.parametrize("batch", [(INPUTS, 3 * INPUTS), {"inputs": INPUTS, "targets": 3 * INPUTS}])
def test_the_mean_becomes_a_sum_over_the_samples(kind: str, batch: Any) -> None:
    torch.manual_seed(0)
    model = Regression(kind)
    loss_sum, count = own_loss(model, batch)
    assert count == 12
    torch.testing.assert_close(loss_sum, F.mse_loss(model.layer(INPUTS), 3 * INPUTS, reduction="sum"))


def test_a_single_tensor_is_the_only_argument() -> None:
    class Squares(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs.square().mean()

    assert own_loss(Squares(), torch.ones(5))[1] == 5


def test_the_output_may_say_what_it_counted() -> None:
    class Tokens(nn.Module):
        def forward(self, inputs: Tensor) -> dict[str, Any]:
            return {"loss": inputs.mean(), "count": inputs.numel()}

    loss_sum, count = own_loss(Tokens(), torch.ones(5, 4))
    assert (loss_sum.item(), count) == (20.0, 20)


class Silent(nn.Module):
    def forward(self, inputs: Tensor) -> Any:
        return {"output": inputs}


class Scores(nn.Module):
    def forward(self, inputs: Tensor) -> Any:
        return inputs


@pytest.mark.parametrize("model", [Silent(), Scores()])
def test_no_loss_is_one_clear_line(model: nn.Module) -> None:
    with pytest.raises(UserError, match=r"returns no loss of its own .* give the trainer a loss function"):
        own_loss(model, torch.ones(3, 2))


def test_a_batch_without_a_tensor_needs_a_count() -> None:
    class Constant(nn.Module):
        def forward(self, _text: str) -> Tensor:
            return torch.ones(())

    with pytest.raises(UserError, match="how many samples"):
        own_loss(Constant(), "text")


def test_the_trainer_needs_no_loss_for_such_a_model() -> None:
    torch.manual_seed(0)
    loader: DataLoader[Any] = DataLoader(TensorDataset(INPUTS, 3 * INPUTS), batch_size=4)
    model = Regression()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.3), device="cpu")
    history = trainer.train(loader, loader, epochs=40)
    assert history[-1]["loss"] < 1e-3 < history[0]["loss"]
    assert history[-1]["train_loss"] < 1e-2


class Named(NamedTuple):
    loss: Tensor
    scores: Tensor


class Counted(NamedTuple):
    loss: Tensor
    count: int


def test_an_output_that_is_a_named_tuple() -> None:
    """Every tuple has a method `count`, which is not meant."""
    value = torch.tensor(2.0)
    total, count = own_loss(lambda inputs: Named(value, inputs), INPUTS)
    assert (total.item(), count) == (24.0, 12)
    assert own_loss(lambda _: Counted(value, 5), INPUTS)[1] == 5
    with pytest.raises(UserError, match="returns no loss of its own"):
        own_loss(lambda inputs: (value, inputs), INPUTS)
