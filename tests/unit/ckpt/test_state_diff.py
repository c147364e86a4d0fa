"""Comparing two states: every tensor whose bits differ is listed in order, with numbers that ignore NaN."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.ckpt import state_diff
from lockstep.ckpt.state_diff import TensorDifference, compare_states
from lockstep.engine.state_digest import digest

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
TYPES += [torch.complex64, torch.float8_e4m3fn]


def only(left: Tensor, right: Tensor) -> TensorDifference:
    (difference,) = compare_states({"a": left}, {"a": right})
    return difference


def test_equal_states_have_no_difference() -> None:
    state = {"a": torch.randn(3, 4), "empty": torch.zeros(0, 2), "one": torch.tensor(5)}
    assert compare_states(state, {name: tensor.clone() for name, tensor in state.items()}) == []


def test_the_size_of_a_difference() -> None:
    left = torch.tensor([3.0, 0.0, 4.0])
    found = only(left, torch.tensor([3.0, 0.0, 4.5]))
    assert (found.num_elements, found.num_different, found.num_nonfinite) == (3, 1, 0)
    assert found.max_abs == 0.5
    assert found.relative == pytest.approx(0.1)
    assert str(found) == "a: 1 of 3 differ, by 0.5 at most, 0.1 of the norm"


def test_chunks_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = torch.randn(50), torch.randn(50)
    right[:20] = left[:20]
    whole = only(left, right)
    monkeypatch.setattr(state_diff, "_CHUNK", 7)
    parts = only(left, right)
    assert parts[:6] == whole[:6]
    assert parts.max_abs == whole.max_abs == (left.double() - right.double()).abs().max()
    assert parts.relative == pytest.approx(whole.relative)
    assert whole.relative == pytest.approx(float((left - right).norm() / left.norm()))


def test_nan_equals_itself_and_is_left_out_of_the_numbers() -> None:
    nan, inf = math.nan, math.inf
    left = torch.tensor([nan, nan, inf, 1.0, 2.0])
    assert compare_states({"a": left}, {"a": left.clone()}) == []
    found = only(left, torch.tensor([nan, 0.0, -inf, 1.0, 2.5]))
    assert (found.num_different, found.num_nonfinite) == (3, 2)
    assert found.max_abs == 0.5
    assert found.relative == pytest.approx(0.5 / 5**0.5)
    assert str(found).endswith(", 2 in NaN or infinity")


def test_zeros_of_different_sign_differ() -> None:
    found = only(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert (found.num_different, found.max_abs, found.relative) == (1, 0.0, 0.0)


def test_a_change_from_zeros_is_infinite_relative_to_the_norm() -> None:
    assert only(torch.zeros(2), torch.ones(2)).relative == math.inf


def test_other_shapes_dtypes_and_missing_tensors_in_order() -> None:
    left = {
        "z": torch.zeros(2),
        "b": torch.zeros(2, 2),
        "same": torch.ones(1),
        "a": torch.zeros(1),
        "gone": torch.ones(3),
    }
    right = {
        "new": torch.ones(1),
        "a": torch.ones(1),
        "same": torch.ones(1),
        "b": torch.zeros(4),
        "z": torch.zeros(2).half(),
    }
    assert [str(difference) for difference in compare_states(left, right)] == [
        "z: float32 (2,) in the first, float16 (2,) in the second",
        "b: float32 (2, 2) in the first, float32 (4,) in the second",
        "a: 1 of 1 differ, by 1 at most, inf of the norm",
        "gone: float32 (3,), only in the first",
        "new: float32 (1,), only in the second",
    ]


@given(st.sampled_from(TYPES), st.integers(0, 40), st.integers(0, 2**32), st.data())
@settings(max_examples=80, deadline=None)
def test_it_finds_a_difference_exactly_if_the_digests_differ(
    dtype: torch.dtype, size: int, seed: int, data: st.DataObject
) -> None:
    """Random bits, including NaNs, of which some bytes are changed."""
    generator = torch.Generator().manual_seed(seed)
    num_bytes = size * torch.empty((), dtype=dtype).element_size()
    most = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, most, (num_bytes,), generator=generator, dtype=torch.uint8)
    other = raw.clone()
    places = data.draw(st.sets(st.integers(0, num_bytes - 1), max_size=3)) if num_bytes else set()
    for place in places:
        other[place] ^= 1
    left, right = {"a": raw.view(dtype)}, {"a": other.view(dtype)}
    found = compare_states(left, right)
    assert (found == []) == (digest(left) == digest(right)) == (not places)
    if found:
        element_size = left["a"].element_size()
        assert found[0].num_different == len({place // element_size for place in places})
        assert not math.isnan(found[0].max_abs)
