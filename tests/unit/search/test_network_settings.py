"""Settings of the guidance network."""

from typing import Any

import pytest

from lockstep.errors import UserError
from lockstep.search.network_settings import NetworkSettings, Stage


def test_a_stage_holds_from_its_generation_on() -> None:
    stages = (Stage(2, policy=0.0), Stage(5, value=0.5, guided_share=0.25))
    settings = NetworkSettings(guided_share=0.5, curriculum=stages)
    assert [settings.stage(generation) for generation in (0, 1, 2, 4, 5, 99)] == [
        *(Stage(), Stage(), stages[0], stages[0], stages[1], stages[1])
    ]
    assert [settings.num_guided(64, generation) for generation in (0, 2, 5)] == [32, 32, 16]


@pytest.mark.parametrize(
    ("share", "stages", "is_off"),
    [
        (0.0, (), True),
        (0.5, (), False),
        (0.0, (Stage(3, guided_share=0.5),), False),
        (0.5, (Stage(3, guided_share=0.0),), False),  # before the stage
        (0.5, (Stage(0, guided_share=0.0),), True),
        (0.5, (Stage(0, guided_share=0.0), Stage(4)), False),
    ],
)
def test_whether_anything_is_ever_guided(share: float, stages: tuple[Stage, ...], is_off: bool) -> None:
    assert NetworkSettings(guided_share=share, curriculum=stages).is_off == is_off


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"train_every": 1.5}, "train_every=1.5"),
        ({"lr": 0}, "lr=0"),
        ({"lr": float("inf")}, "lr=inf"),
        ({"reach": -1.0}, "reach=-1.0"),
        ({"reach": float("inf")}, "reach=inf"),
        ({"lanes": 6, "global_batch": 120}, "lanes=6: expected a power of two"),
        ({"memory": 7}, "memory=7: expected 8 or more"),
        ({"guided_share": 1.5}, "guided_share=1.5: expected a share from 0 to 1"),
        ({"candidates": 1}, "candidates=1: expected 2 or more"),
        ({"candidates": 2.5}, "candidates=2.5"),
        ({"global_batch": 100, "lanes": 8}, "global_batch=100: expected a multiple of lanes=8"),
        ({"curriculum": (Stage(5), Stage(5))}, r"generations \[5, 5\]"),
    ],
)
def test_what_cannot_be_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        NetworkSettings(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"generation": -1}, "generation=-1"),
        ({"value": -0.5}, "value=-0.5: expected the weight of a loss"),
        ({"policy": float("nan")}, "policy=nan"),
        ({"value": float("inf")}, "value=inf"),
        ({"guided_share": 2.0}, "guided_share=2.0"),
    ],
)
def test_so_is_a_stage_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Stage(**given)
