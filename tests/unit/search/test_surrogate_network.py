"""The surrogate network: its members in one batched model, and what they predict."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lockstep.errors import UserError
from lockstep.search.surrogate_network import CurriculumStage, EnsembleLinear, NetworkSettings, SurrogateNetwork


def network(members: int = 3, num_options: int = 2) -> SurrogateNetwork:
    generator = torch.Generator().manual_seed(5)
    return SurrogateNetwork(4, num_options, 2, members=members, width=8, depth=2, generator=generator)


def test_members_are_linear_layers_of_their_own() -> None:
    layer = EnsembleLinear(3, 4, 5, torch.Generator().manual_seed(1))
    torch.nn.init.normal_(layer.bias)
    inputs = torch.randn(3, 7, 4)
    outputs = layer(inputs)
    for member in range(3):
        expected = F.linear(inputs[member], layer.weight[member].T, layer.bias[member, 0])
        torch.testing.assert_close(outputs[member], expected)
    assert not torch.equal(layer.weight[0], layer.weight[1])


def test_a_forecast_has_a_table_for_each_quantity() -> None:
    outlook = network()(torch.randn(7, 6))
    assert [tuple(part.shape) for part in outlook] == [(3, 7, 2), (3, 7), (3, 7, 4), (3, 7, 4), (3, 7, 2)]


def test_a_spread_has_bounds() -> None:
    made = network()
    torch.nn.init.constant_(made.policy.bias, 50.0)
    assert made(torch.randn(7, 6)).log_stds.max() == 1.0
    torch.nn.init.constant_(made.policy.bias, -50.0)
    assert made(torch.randn(7, 6)).log_stds.min() == -4.0


def test_what_is_expected_is_the_members_mean() -> None:
    made, features = network(), torch.randn(7, 6)
    torch.nn.init.constant_(made.value.bias[..., 2:], -50.0)  # none will fail
    torch.testing.assert_close(made.expected_costs(features), made(features).costs.mean(0).detach())


def test_a_likely_failure_raises_the_expected_costs() -> None:
    made, features = network(), torch.randn(7, 6)
    torch.nn.init.constant_(made.value.bias[..., 2:], -50.0)
    sure = made.expected_costs(features)
    torch.nn.init.constant_(made.value.bias[..., 2:], 50.0)
    assert (made.expected_costs(features) > sure + 1.0).all()


def test_the_generator_alone_decides_the_weights() -> None:
    torch.manual_seed(1)
    first = network().state_dict()
    torch.manual_seed(2)
    assert all(torch.equal(tensor, first[name]) for name, tensor in network().state_dict().items())


def test_a_stage_holds_from_its_generation_on() -> None:
    stages = (CurriculumStage(2, policy=0.0), CurriculumStage(5, value=0.5, guided_share=0.25))
    settings = NetworkSettings(guided_share=0.5, curriculum=stages)
    assert [settings.stage(generation) for generation in (0, 1, 2, 4, 5, 99)] == [
        *(CurriculumStage(), CurriculumStage(), stages[0], stages[0], stages[1], stages[1])
    ]
    assert [settings.num_guided(64, generation) for generation in (0, 2, 5)] == [32, 32, 16]


@pytest.mark.parametrize(
    ("share", "stages", "is_off"),
    [
        (0.0, (), True),
        (0.5, (), False),
        (0.0, (CurriculumStage(3, guided_share=0.5),), False),
        (0.5, (CurriculumStage(3, guided_share=0.0),), False),  # before the stage
        (0.5, (CurriculumStage(0, guided_share=0.0),), True),
        (0.5, (CurriculumStage(0, guided_share=0.0), CurriculumStage(4)), False),
    ],
)
def test_whether_anything_is_ever_guided(share: float, stages: tuple[CurriculumStage, ...], is_off: bool) -> None:
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
        ({"guided_share": 1.5}, "guided_share=1.5: expected a number from 0 to 1"),
        ({"candidates": 1}, "candidates=1: expected 2 or more"),
        ({"candidates": 2.5}, "candidates=2.5"),
        ({"global_batch": 100, "lanes": 8}, "global_batch=100: expected a multiple of lanes=8"),
        ({"curriculum": (CurriculumStage(5), CurriculumStage(5))}, r"generations \[5, 5\]"),
    ],
)
def test_an_impossible_setting_is_named(given: dict[str, Any], message: str) -> None:
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
def test_an_impossible_stage_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        CurriculumStage(**given)
