"""The network that learns from evaluated designs: a body with two heads, for a design's value and for moves from it.

The *value* says what a design will cost, on the scale of the designs it was taught with, and whether it will fail. The
*policy* says how a design is best changed: a distribution of moves, learned from pairs of designs of which the second
is better. Several such networks stand side by side, as members that learn the same from different beginnings: where
they disagree, none of them knows.
"""

import math
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Bounds of the policy's log-deviation: a move has a size, and a likelihood has an end.
_LOWEST_SPREAD, _HIGHEST_SPREAD = -4.0, 1.0
_FAILURE_COST = 3.0  # a certain failure's, in deviations of good designs' costs: worse than any of a few hundred


class Outlook(NamedTuple):
    """What the members think of some designs: tables of member × design × …"""

    costs: Tensor  # × objective
    failures: Tensor  # the log-odds
    moves: Tensor  # × number among the features: the middle of good moves
    spreads: Tensor  # the same: the logarithm of their deviation
    options: Tensor  # × option of a choice among the features: the log-odds that better designs have it


class GuidanceNetwork(nn.Module):
    """A feature vector has `num_numbers` numbers first, then `num_options` zeros and ones."""

    def __init__(
        self,
        num_numbers: int,
        num_options: int,
        num_objectives: int,
        *,
        members: int,
        width: int,
        depth: int,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        sizes = [num_numbers + num_options] + [width] * depth
        self.body = nn.ModuleList(SideBySide(members, *pair, generator) for pair in pairwise(sizes))
        self._value_sizes = [num_objectives, 1]
        self._policy_sizes = [num_numbers, num_numbers, num_options]
        self.value = SideBySide(members, width, sum(self._value_sizes), generator)
        self.policy = SideBySide(members, width, sum(self._policy_sizes), generator)

    def forward(self, features: Tensor) -> Outlook:
        hidden = self._hidden(features)
        costs, failures = self.value(hidden).split(self._value_sizes, -1)
        moves, spreads, options = self.policy(hidden).split(self._policy_sizes, -1)
        return Outlook(costs, failures[..., 0], moves, spreads.clamp(_LOWEST_SPREAD, _HIGHEST_SPREAD), options)

    @property
    def device(self) -> torch.device:
        return self.value.weight.device

    @torch.no_grad()
    def expected_costs(self, features: Tensor) -> Tensor:
        """A row a design and a column an objective, as the members see them on average; a failure is dear."""
        costs, failures = self.value(self._hidden(features)).split(self._value_sizes, -1)
        expected: Tensor = torch.lerp(costs, torch.full_like(costs, _FAILURE_COST), failures.sigmoid()).mean(0)
        return expected.cpu()

    def _hidden(self, features: Tensor) -> Tensor:
        hidden = features.expand(self.value.members, *features.shape)
        for layer in self.body:
            hidden = F.silu(layer(hidden))
        return hidden


class SideBySide(nn.Module):
    """A linear layer of each member, in one product."""

    def __init__(self, members: int, num_inputs: int, num_outputs: int, generator: torch.Generator) -> None:
        super().__init__()
        self.members = members
        drawn = torch.randn(members, num_inputs, num_outputs, generator=generator)
        self.weight = nn.Parameter(drawn / math.sqrt(num_inputs))
        self.bias = nn.Parameter(torch.zeros(members, 1, num_outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, inputs, self.weight)
