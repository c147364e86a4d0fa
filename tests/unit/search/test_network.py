"""The guidance network: members side by side, and what they expect."""

import torch
import torch.nn.functional as F

from lockstep.search.network import GuidanceNetwork, SideBySide


def network(members: int = 3, num_options: int = 2) -> GuidanceNetwork:
    generator = torch.Generator().manual_seed(5)
    return GuidanceNetwork(4, num_options, 2, members=members, width=8, depth=2, generator=generator)


def test_members_are_linear_layers_of_their_own() -> None:
    layer = SideBySide(3, 4, 5, torch.Generator().manual_seed(1))
    torch.nn.init.normal_(layer.bias)
    inputs = torch.randn(3, 7, 4)
    outputs = layer(inputs)
    for member in range(3):
        expected = F.linear(inputs[member], layer.weight[member].T, layer.bias[member, 0])
        torch.testing.assert_close(outputs[member], expected)
    assert not torch.equal(layer.weight[0], layer.weight[1])


def test_an_outlook_has_a_table_for_each_thing() -> None:
    outlook = network()(torch.randn(7, 6))
    assert [tuple(part.shape) for part in outlook] == [(3, 7, 2), (3, 7), (3, 7, 4), (3, 7, 4), (3, 7, 2)]


def test_a_spread_has_bounds() -> None:
    made = network()
    torch.nn.init.constant_(made.policy.bias, 50.0)
    assert made(torch.randn(7, 6)).spreads.max() == 1.0
    torch.nn.init.constant_(made.policy.bias, -50.0)
    assert made(torch.randn(7, 6)).spreads.min() == -4.0


def test_what_is_expected_is_the_members_mean() -> None:
    made, features = network(), torch.randn(7, 6)
    torch.nn.init.constant_(made.value.bias[..., 2:], -50.0)  # none will fail
    torch.testing.assert_close(made.expected_costs(features), made(features).costs.mean(0).detach())


def test_a_failure_is_dear() -> None:
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
