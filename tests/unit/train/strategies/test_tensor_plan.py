"""Which modules the patterns of a tensor plan match."""

import pytest
from torch import nn

from lockstep.errors import UserError
from lockstep.train.strategies.tensor_plan import TensorPlan
from tests.unit.train.strategies.models import Block, Model


def test_of_several_patterns_the_first_counts() -> None:
    plan = TensorPlan({"blocks.0.*": "column", "*.wide": "row", "*.norm": "sequence"}, 2)
    model = Model()
    del model.blocks[0].norm
    styles = {planned.path: planned.style for planned in plan.modules(model)}
    assert styles == {
        "blocks.0.wide": "column",
        "blocks.0.narrow": "column",
        "blocks.1.wide": "row",
        "blocks.1.norm": "sequence",
    }
    plan.check_matched()


def test_a_pattern_may_match_any_of_several_models() -> None:
    plan = TensorPlan({"wide": "column", "0": "column"}, 2)
    plan.modules(Block())
    with pytest.raises(UserError, match="'0' matches no module"):
        plan.check_matched()
    plan.modules(nn.Sequential(nn.Linear(2, 2)))
    plan.check_matched()
