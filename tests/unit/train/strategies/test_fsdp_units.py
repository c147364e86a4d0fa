"""Which modules become FSDP units: by class, or by their number of parameters."""

from typing import Any

import pytest
from torch import nn

from lockstep.train.strategies.fsdp_units import FsdpOptions, choose_units
from tests.unit.train.strategies.models import Model


def names(model: nn.Module, **options: Any) -> list[str]:
    found = {module: path for path, module in model.named_modules()}
    return [found[module] for module in choose_units(model, FsdpOptions.read(options))]


def test_units_by_class_are_inner_before_outer() -> None:
    assert names(Model(), wrap=["Block", "LayerNorm"]) == [
        "blocks.1.norm",
        "blocks.1",
        "blocks.0.norm",
        "blocks.0",
        "",
    ]


@pytest.mark.parametrize(
    ("least", "units"),
    [
        (1000, ["blocks.1.wide", "blocks.0.wide", ""]),  # 1,100 each; the rest of a block has 206
        (1200, ["blocks.1", "blocks.0", ""]),
        (200, ["attention", "blocks.1.narrow", "blocks.1.wide", "blocks.0.narrow", "blocks.0.wide", ""]),
        # Not attention's own layer, which is never called; not a list of blocks; not a layer tied to one outside;
        # not an embedding, whose weight may be used elsewhere.
        (100, ["attention", "blocks.1.narrow", "blocks.1.wide", "blocks.0.narrow", "blocks.0.wide", ""]),
        (2500, [""]),
    ],
)
def test_units_by_size_are_the_innermost_with_enough_parameters(least: int, units: list[str]) -> None:
    assert names(Model(), min_parameters=least) == units
