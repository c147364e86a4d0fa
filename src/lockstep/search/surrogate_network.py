"""The surrogate network, an ensemble with a value head and a policy head, and its settings.

The *value* head predicts a design's costs, on the scale of the designs it was trained on, and whether it will fail. The
*policy* head predicts how to improve a design: a distribution of moves, learned from pairs of a design and a better one
near it. The members of the ensemble learn the same data from different initial weights, and predicted costs are their
mean.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.config.argument_checks import require_count, require_fraction, require_positive, require_whole
from lockstep.errors import UserError

MIN_TRAINING_DESIGNS = 8  # with fewer good designs the network is not trained

# Bounds of the policy's log-deviation: they keep moves and likelihoods finite.
_MIN_LOG_STD, _MAX_LOG_STD = -4.0, 1.0
_FAILURE_COST = 3.0  # of a certain failure, in standard deviations: above the good costs of a few hundred designs


@dataclass(frozen=True)
class CurriculumStage:
    """Settings of the network that apply from a generation on.

    Args:
        generation: the first generation that the stage applies to, from 0.
        value: the weight of the value head's loss.
        policy: the weight of the policy head's loss.
        guided_share: share of the children that the network chooses. None: that of `NetworkSettings`.
    """

    generation: int = 0
    value: float = 1.0
    policy: float = 1.0
    guided_share: float | None = None

    def __post_init__(self) -> None:
        require_whole("generation", self.generation)
        for name in ("value", "policy"):
            weight = getattr(self, name)
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
                raise UserError(f"{name}={weight!r}: expected the weight of a loss, a number of 0 or more")
        if self.guided_share is not None:
            require_fraction("guided_share", self.guided_share)


@dataclass(frozen=True)
class NetworkSettings:
    """How the surrogate network is built and trained, and how much of each generation it guides.

    Args:
        train_every: generations between two trainings.
        steps: updates per training.
        global_batch: samples per update.
        lanes: parts of a global batch, a power of two. With more ranks than that, each trains the whole network.
        lr: the learning rate at the start of a training; it falls to a tenth.
        members: networks in the ensemble, whose mean is used.
        width: of the hidden layers.
        depth: number of hidden layers.
        memory: how many designs it learns from: the best of the latest.
        guided_share: share of the children that the network chooses; the others come from the strategy alone.
        candidates: screened for each guided design: half from the strategy, half proposed by the policy head.
        reach: how far from a design it may propose others, in standard deviations of the designs it learned from.
        curriculum: stages in order; before the first one, `CurriculumStage()` applies.
    """

    train_every: int = 1
    steps: int = 60
    global_batch: int = 128
    lanes: int = 4
    lr: float = 6e-3
    members: int = 4
    width: int = 64
    depth: int = 2
    memory: int = 256
    guided_share: float = 0.5
    candidates: int = 16
    reach: float = 2.0
    curriculum: tuple[CurriculumStage, ...] = ()

    def __post_init__(self) -> None:
        for name in ("train_every", "steps", "global_batch", "lanes", "members", "width", "depth", "memory"):
            require_count(name, getattr(self, name))
        if self.lanes & (self.lanes - 1):
            raise UserError(f"lanes={self.lanes}: expected a power of two")
        if self.memory < MIN_TRAINING_DESIGNS:
            raise UserError(
                f"memory={self.memory}: expected {MIN_TRAINING_DESIGNS} or more: fewer are not enough to learn from"
            )
        for name in ("lr", "reach"):
            require_positive(name, getattr(self, name))
            if math.isinf(getattr(self, name)):
                raise UserError(f"{name}=inf: expected a finite number")
        require_fraction("guided_share", self.guided_share)
        if self.global_batch % self.lanes:
            raise UserError(f"global_batch={self.global_batch}: expected a multiple of lanes={self.lanes}")
        require_whole("candidates", self.candidates)
        if self.candidates < 2:
            raise UserError(f"candidates={self.candidates}: expected 2 or more, so that there is a choice")
        object.__setattr__(self, "curriculum", tuple(self.curriculum))
        first = [stage.generation for stage in self.curriculum]
        if first != sorted(set(first)):
            raise UserError(
                f"curriculum: stages from generations {first}: expected each to begin after the previous one"
            )

    def stage(self, generation: int) -> CurriculumStage:
        """Return the curriculum stage of a generation."""
        begun = [stage for stage in self.curriculum if stage.generation <= generation]
        return begun[-1] if begun else CurriculumStage()

    def num_guided(self, count: int, generation: int) -> int:
        """Return how many of `count` offspring the network guides in this `generation`."""
        share = self.stage(generation).guided_share
        return round(count * (self.guided_share if share is None else share))

    @property
    def is_off(self) -> bool:
        """Whether no generation is ever guided."""
        shares = [self.guided_share if stage.guided_share is None else stage.guided_share for stage in self.curriculum]
        starts_later = not self.curriculum or self.curriculum[0].generation > 0
        return not any(shares) and not (starts_later and self.guided_share)


class SurrogateOutput(NamedTuple):
    """Predictions for some designs: tensors of shape (members, designs, …)."""

    costs: Tensor  # (…, objectives)
    failures: Tensor  # logits
    moves: Tensor  # (…, numeric features): means of good moves
    log_stds: Tensor  # (…, numeric features): log standard deviations of good moves
    options: Tensor  # (…, option features): logits that better designs have the option


class SurrogateNetwork(nn.Module):
    """The ensemble. A feature vector has `num_numbers` numbers first, then `num_options` zeros and ones."""

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
        self.body = nn.ModuleList(EnsembleLinear(members, *pair, generator) for pair in pairwise(sizes))
        self._value_sizes = [num_objectives, 1]
        self._policy_sizes = [num_numbers, num_numbers, num_options]
        self.value = EnsembleLinear(members, width, sum(self._value_sizes), generator)
        self.policy = EnsembleLinear(members, width, sum(self._policy_sizes), generator)

    def forward(self, features: Tensor) -> SurrogateOutput:
        hidden = self._hidden(features)
        costs, failures = self.value(hidden).split(self._value_sizes, -1)
        moves, log_stds, options = self.policy(hidden).split(self._policy_sizes, -1)
        return SurrogateOutput(costs, failures[..., 0], moves, log_stds.clamp(_MIN_LOG_STD, _MAX_LOG_STD), options)

    @property
    def device(self) -> torch.device:
        return self.value.weight.device

    @torch.no_grad()
    def expected_costs(self, features: Tensor) -> Tensor:
        """Return the members' mean costs, (designs, objectives), in which a likely failure is expensive."""
        costs, failures = self.value(self._hidden(features)).split(self._value_sizes, -1)
        expected: Tensor = torch.lerp(costs, torch.full_like(costs, _FAILURE_COST), failures.sigmoid()).mean(0)
        return expected.cpu()

    def _hidden(self, features: Tensor) -> Tensor:
        hidden = features.expand(self.value.members, *features.shape)
        for layer in self.body:
            hidden = F.silu(layer(hidden))
        return hidden


class EnsembleLinear(nn.Module):
    """A linear layer for each member, computed as one batched product."""

    def __init__(self, members: int, num_inputs: int, num_outputs: int, generator: torch.Generator) -> None:
        super().__init__()
        self.members = members
        drawn = torch.randn(members, num_inputs, num_outputs, generator=generator)
        self.weight = nn.Parameter(drawn / math.sqrt(num_inputs))
        self.bias = nn.Parameter(torch.zeros(members, 1, num_outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, inputs, self.weight)
