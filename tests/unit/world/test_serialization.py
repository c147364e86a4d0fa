"""Values come back unchanged; a value that cannot is refused with its place."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import UserError
from lockstep.world.serialization import Shard, join_values, split_values

leaves = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text() | st.binary()
keys = leaves | st.tuples(st.integers(), st.text())
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.sampled_from(["$tensor", "$pairs", "$x"]), inner)
        | st.dictionaries(keys, inner)
    ),
)


def round_trip(value: Any) -> Any:
    form, tensors, _ = split_values(value)
    return join_values(json.loads(json.dumps(form, allow_nan=False)), tensors)


@given(values)
def test_plain_values_come_back(value: Any) -> None:
    assert repr(round_trip(value)) == repr(value)  # repr: also types, NaN and the zero's sign


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64])
def test_tensors_come_back(dtype: torch.dtype) -> None:
    tensor = torch.ones(2, 3).to(dtype)
    value = round_trip({"a": [tensor, {"b": tensor}], 5: (tensor,)})
    assert value["a"][0].dtype == dtype
    assert all(torch.equal(each, tensor) for each in (value["a"][0], value["a"][1]["b"], value[5][0]))


def test_numpy_comes_back() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3).T
    value = round_trip({"array": array, "scalar": np.float32(0.1), "count": np.int64(3), "flag": np.bool_(True)})
    assert isinstance(value["array"], np.ndarray)
    assert value["array"].dtype == array.dtype
    assert (value["array"] == array).all()
    assert value["scalar"] == float(np.float32(0.1))
    assert value["count"] == 3
    assert value["flag"] is True


def test_tensors_whose_paths_collide() -> None:
    value = {"a": {"b": torch.tensor(1)}, "a/b": torch.tensor(2), ("a", "b"): torch.tensor(3)}
    back = round_trip(value)
    assert [int(back["a"]["b"]), int(back["a/b"]), int(back["a", "b"])] == [1, 2, 3]


def test_shards_are_kept_apart() -> None:
    shard = Shard(torch.ones(2), (2,), (4,))
    found = split_values({"s": shard, "t": torch.ones(1)})
    assert found.shards == {"s": shard}
    assert found.tensors.keys() == {"t"}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({1, 2}, "set"),
        (object(), "object"),
        (3j, "complex"),
        (np.longdouble(1), "longdouble"),
        (np.array(["a"]), "ndarray"),
        (torch.ones(2).to_sparse(), "Tensor"),
        (torch.ones(2, device="meta"), "Tensor"),
        (print, "builtin_function_or_method"),
    ],
)
def test_unsupported_values_are_named_with_their_place(value: Any, kind: str) -> None:
    with pytest.raises(UserError, match=rf"optimizer\['state'\]\[0\] has the type {kind}: only"):
        split_values({"state": [value]}, "optimizer")


def test_nesting_is_bounded() -> None:
    value: Any = []
    for _ in range(100):
        value = [value]
    assert round_trip(value) == value
    value = [value]
    with pytest.raises(UserError, match="nested more than 100 deep"):
        split_values(value)
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UserError, match="nested more than 100 deep"):
        split_values(endless)


FORGED = [
    {"$unknown": 1},
    {"$tensor": "x"},
    {"$tensor": ["x"]},
    {"$tensor": "t", "more": 1},
    {"a": 1, "$float": "nan"},
    {"$array": "half"},
    {"$tuple": "ab"},
    {"$tuple": {"a": 1}},
    {"$tuple": 5},
    {"$pairs": [[[1], 2]]},
    {"$pairs": [[{"a": 1}, 2]]},
    {"$pairs": [[1, 2], [1, 2]]},
    {"$pairs": [[1]]},
    {"$pairs": [5]},
    {"$pairs": {"a": 1}},
    {"$float": "one"},
    {"$float": [1]},
    {"$bytes": "*"},
    {"$bytes": "YQ"},
    {"$bytes": 5},
]


@pytest.mark.parametrize("form", FORGED, ids=str)
def test_forged_forms_are_refused(form: Any) -> None:
    tensors = {"t": torch.ones(1), "half": torch.ones(1, dtype=torch.bfloat16)}
    for nested in (form, [form], {"a": form}, {"$tuple": [form]}, {"$pairs": [[1, form]]}):
        with pytest.raises(ValueError, match="does not describe the saved values"):
            join_values(nested, tensors)


def test_non_finite_floats() -> None:
    assert split_values([math.inf, -math.inf]).form == [{"$float": "inf"}, {"$float": "-inf"}]
    assert math.isnan(round_trip(math.nan))
