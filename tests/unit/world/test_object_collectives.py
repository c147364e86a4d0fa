"""Values are sent as JSON and tensors of bounded size, and nothing that is received is executed."""

import pickle
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import UserError
from lockstep.world.object_collectives import SharedCounters, decode_value, encode_value
from lockstep.world.world import World

if TYPE_CHECKING:
    from torch._C._distributed_c10d import FileStore  # the stubs of torch.distributed lack it
else:
    from torch.distributed import FileStore

KEYS = st.text().filter(lambda key: key != "$tensor")  # reserved
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=10,
)


@given(PLAIN)
def test_plain_values_come_back_equal(value: object) -> None:
    assert decode_value(encode_value(value)) == value


def test_tensors_of_any_kind_come_back() -> None:
    shared = torch.arange(6.0).view(2, 3)
    tensors = [shared, shared.t(), shared[:, 1], torch.tensor(3), torch.empty(0), torch.ones(2, dtype=torch.bfloat16)]
    for sent, received in zip(tensors, decode_value(encode_value(tensors)), strict=True):
        assert sent.dtype == received.dtype
        assert torch.equal(sent, received)


@pytest.mark.parametrize("value", [{1, 2}, object(), range(3), [lambda: None]])
def test_other_values_are_refused_with_their_place(value: object) -> None:
    with pytest.raises(UserError, match=r"value\['x'\]\[0\]"):
        encode_value({"x": [value]})


def test_sizes_are_bounded_when_sending_and_receiving() -> None:
    packet = encode_value("x" * 1000)
    with pytest.raises(UserError, match="over the limit of 100"):
        encode_value("x" * 1000, max_bytes=100)
    with pytest.raises(UserError, match="over the limit of 100"):
        decode_value(packet, max_bytes=100)


def test_a_pickle_is_refused() -> None:
    packet = torch.frombuffer(bytearray(pickle.dumps({"a": 1})), dtype=torch.uint8)
    with pytest.raises(Exception, match="header"):
        decode_value(packet)


def test_reading_a_shared_counter_adds_nothing_to_a_store_that_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = SharedCounters(World())
    assert [counters.add("taken"), counters.add("taken", 4), counters.read("taken"), counters.read("done")] == [
        1,
        5,
        5,
        0,
    ]
    file = tmp_path / "store"
    monkeypatch.setattr(counters, "_store", FileStore(str(file)))
    counters.add("taken", 3)
    size = file.stat().st_size
    assert [counters.read("taken"), counters.read("done")] == [3, 0]
    assert file.stat().st_size == size
