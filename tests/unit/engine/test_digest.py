"""One number for a whole state: equal for equal bits, however they are kept; different for any other bit."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lockstep.engine.digest import digest, state_of
from lockstep.engine.trace import DigestTrace, first_difference
from lockstep.errors import UserError


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
def test_anything_else_does(change: dict[str, Tensor], request: pytest.FixtureRequest) -> None:
    same = request.node.callspec.id == "nothing"
    assert (digest(state() | change) == digest(state())) is same


def test_even_the_sign_of_zero() -> None:
    assert digest({"a": torch.tensor(0.0)}) != digest({"a": torch.tensor(-0.0)})


def test_types_that_numpy_does_not_have() -> None:
    assert digest({"a": torch.ones(3, dtype=torch.bfloat16)}) != digest({"a": torch.zeros(3, dtype=torch.bfloat16)})


def test_weights_buffers_optimizer_and_average_are_all_in_it() -> None:
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


def write(path: Path, states: list[dict[str, Tensor]]) -> Path:
    trace = DigestTrace(path)
    for step, each in enumerate(states, 1):
        trace.record(step, each)
    trace.close()
    return path


def test_the_first_step_and_tensor_that_differ_are_named(tmp_path: Path) -> None:
    other = state() | {"b": torch.tensor([1, 9])}
    left = write(tmp_path / "left", [state(), state(), state()])
    right = write(tmp_path / "right", [state(), other, other])
    difference = first_difference(left, right)
    assert difference is not None
    assert str(difference) == "step 2: b"
    assert first_difference(left, left) is None


def test_all_that_differ_are_counted_and_the_models_order_decides_who_is_first(tmp_path: Path) -> None:
    one = {"z": torch.ones(1), "a": torch.ones(1)}
    two = {"z": torch.zeros(1), "a": torch.zeros(1)}
    difference = first_difference(write(tmp_path / "one", [one]), write(tmp_path / "two", [two]))
    assert str(difference) == "step 1: z (and 1 more)"


def test_traces_must_have_something_in_common(tmp_path: Path) -> None:
    empty, full = tmp_path / "empty", write(tmp_path / "full", [state()])
    empty.write_text("")
    with pytest.raises(UserError, match="no step in common"):
        first_difference(empty, full)
    with pytest.raises(UserError, match="there is no trace at"):
        first_difference(tmp_path / "nowhere", full)
