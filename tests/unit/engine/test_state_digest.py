"""Digests: equal for equal bits, whatever their layout; different if any bit differs."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lockstep.engine.state_digest import digest, state_of, value_digest


def state() -> dict[str, Tensor]:
    return {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([1, 2])}


def test_order_and_memory_layout_do_not_matter() -> None:
    reversed_, transposed = dict(reversed(state().items())), state()
    transposed["a"] = transposed["a"].t().contiguous().t()
    assert digest(reversed_) == digest(transposed) == digest(state())


@pytest.mark.parametrize(
    "change",
    [
        {"a": torch.arange(6.0).view(3, 2)},
        {"a": torch.arange(6.0, dtype=torch.float64).view(2, 3)},
        {"b": torch.tensor([1, 3])},
        {"c": torch.zeros(0)},
        {"a": torch.arange(6.0).view(2, 3) * torch.tensor(-1.0).pow(2) - 0.0},
    ],
    ids=["shape", "type", "value", "name", "nothing"],
)
def test_any_other_difference_matters(change: dict[str, Tensor], request: pytest.FixtureRequest) -> None:
    same = request.node.callspec.id == "nothing"
    assert (digest(state() | change) == digest(state())) is same


def test_the_sign_of_zero_matters() -> None:
    assert digest({"a": torch.tensor(0.0)}) != digest({"a": torch.tensor(-0.0)})


def test_dtypes_that_numpy_does_not_have() -> None:
    assert digest({"a": torch.ones(3, dtype=torch.bfloat16)}) != digest({"a": torch.zeros(3, dtype=torch.bfloat16)})


def test_weights_buffers_optimizer_and_average_are_all_included() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    state = state_of({"model": model}, {"optimizer": optimizer}, {"average": {"0.weight": torch.zeros(2, 2)}})
    assert {
        "model/0.weight",
        "model/1.running_mean",
        "model/1.num_batches_tracked",
        "optimizer/model/0.weight/exp_avg",
        "optimizer/model/0.weight/step",
        "average/0.weight",
    } <= state.keys()


@dataclass
class Pair:
    image: Tensor
    name: str


def batch() -> dict[str, Any]:
    return {
        "pair": Pair(torch.arange(4.0), "a"),
        "array": np.arange(3),
        "nested": [(1, 2.0), {"deep": torch.ones(2)}],
        "sparse": torch.eye(2).to_sparse(),
        "object": object(),
        "none": None,
    }


@pytest.mark.parametrize(
    "change",
    [
        {"pair": Pair(torch.arange(4.0), "b")},
        {"pair": Pair(-torch.arange(4.0), "a")},
        {"array": np.arange(3) + 1},
        {"nested": [(1, 2.0), {"deep": torch.zeros(2)}]},
        {"nested": [(1, 2.5), {"deep": torch.ones(2)}]},
        {"sparse": torch.zeros(2, 2).to_sparse()},
        {"none": 0},
        {"more": None},
    ],
    ids=lambda change: str(next(iter(change))),
)
def test_every_part_of_a_batch_counts_and_nothing_of_the_process_does(change: dict[str, Any]) -> None:
    assert value_digest(batch()) == value_digest(batch())
    assert value_digest(batch() | change) != value_digest(batch())


def test_parts_of_a_batch_cannot_be_moved_from_one_to_the_next() -> None:
    assert value_digest([["a"], "b"]) != value_digest([["a", "b"]])
    assert value_digest([{"a": 1}, "b", 2]) != value_digest([{"a": 1, "b": 2}])
    assert value_digest(["ab", "c"]) != value_digest(["a", "bc"])
