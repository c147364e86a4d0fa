"""The size and the direction of a difference between recorded values."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lockstep.verify.value_comparison import UpdateValues, alignment_of, largest_gap, relative_distance


def recorded(folder: Path, one: dict[str, list[float]], many: dict[str, list[float]]) -> UpdateValues:
    for name, tensors in (("one", one), ("many", many)):
        save_file({key: np.array(values) for key, values in tensors.items()}, folder / name)
    return UpdateValues(folder / "one", folder / "many")


def test_the_size_of_a_difference(tmp_path: Path) -> None:
    ones = {"gradient/b": [1.0, 1.0, 1.0]}
    values = recorded(tmp_path, {"gradient/a": [1.0, 2.0]} | ones, {"gradient/a": [1.0, 2.5]} | ones)
    pairs = values.pairs("gradient")
    assert largest_gap(pairs["a"]) == (0.5, 0.2)
    assert str(largest_gap(pairs["a"])) == "by up to 0.5 (0.2 of the tensor's largest value)"
    assert str(largest_gap(pairs["b"])) == "in values that were not recorded"
    assert relative_distance(pairs.values()) == pytest.approx(0.5 / np.sqrt(10.25))
    assert values.pairs("weights") == {}
    assert relative_distance([]) == 0.0


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_a_value_that_is_not_finite_on_one_side(tmp_path: Path, odd: float) -> None:
    both = {"gradient/b": [odd, 1.0]}
    values = recorded(tmp_path, {"gradient/a": [odd, 2.0]} | both, {"gradient/a": [odd, odd]} | both)
    pairs = values.pairs("gradient")
    assert str(largest_gap(pairs["a"])) == "and one of them is not finite"
    assert largest_gap(pairs["b"]) == (0.0, 0.0), "the same on both sides"


@pytest.mark.parametrize(
    ("many", "scale", "is_scaled"),
    [
        ([2.0, -4.0, 8.0], 2.0, True),
        ([-1.0, 2.0, -4.0], -1.0, True),
        ([1.001, -2.002, 4.004], 1.001, True),
        ([1.0, -2.0, 4.004], 1.00076, False),
        ([1.0, -2.0, 4.0000004], 1.0, False),
    ],
)
def test_a_vector_that_is_only_scaled(tmp_path: Path, many: list[float], scale: float, is_scaled: bool) -> None:
    values = recorded(tmp_path, {"gradient/a": [1.0, -2.0, 4.0]}, {"gradient/a": many})
    alignment = alignment_of(values.pairs("gradient").values())
    assert alignment is not None
    assert alignment.scale == pytest.approx(scale, abs=1e-5)
    assert alignment.is_only_scaled == is_scaled


def test_nothing_to_align(tmp_path: Path) -> None:
    values = recorded(tmp_path, {"gradient/a": [1.0]}, {"gradient/a": [0.0], "gradient/b": [1.0]})
    assert alignment_of(values.pairs("gradient").values()) is None
    assert not values.has_same_tensors("gradient")
