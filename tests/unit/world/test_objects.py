"""Values travel as bounded JSON and tensors: nothing else gets in, nothing is executed on the way out."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.world.objects import decode, encode

KEYS = st.text().filter(lambda key: key != "$tensor")  # reserved
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=10,
)


@given(PLAIN)
def test_plain_values_come_back_equal(value: object) -> None:
    assert decode(encode(value)) == value


def test_tensors_of_any_kind_come_back() -> None:
    shared = torch.arange(6.0).view(2, 3)
    tensors = [shared, shared.t(), shared[:, 1], torch.tensor(3), torch.empty(0), torch.ones(2, dtype=torch.bfloat16)]
    for sent, received in zip(tensors, decode(encode(tensors)), strict=True):
        assert sent.dtype == received.dtype
        assert torch.equal(sent, received)


@pytest.mark.parametrize("value", [{1, 2}, object(), range(3), [lambda: None]])
def test_anything_else_is_refused_with_its_place(value: object) -> None:
    with pytest.raises(TypeError, match=r"value\['x'\]\[0\]"):
        encode({"x": [value]})


def test_sizes_are_bounded_on_both_ends() -> None:
    packet = encode("x" * 1000)
    with pytest.raises(ValueError, match="over the limit of 100"):
        encode("x" * 1000, max_bytes=100)
    with pytest.raises(ValueError, match="over the limit of 100"):
        decode(packet, max_bytes=100)


def test_a_pickle_is_not_a_packet() -> None:
    packet = torch.frombuffer(bytearray(pickle.dumps({"a": 1})), dtype=torch.uint8)
    with pytest.raises(Exception, match="header"):
        decode(packet)
