"""The surrogate's training data: scaled features of evaluated designs, their costs, and moves to better ones nearby.

A training set has a fixed number of samples drawn from the archive, so neither its size nor the time to train on it
depends on the size of the archive.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.loss_table import Terms
from lockstep.search.design_archive import DesignArchive
from lockstep.search.genome import Genome
from lockstep.search.pareto import best_first
from lockstep.search.surrogate_network import SurrogateNetwork

_MIN_SCALE = 1e-6  # share of a gene's range: smaller differences are not resolved
_MAX_FEATURE = 8.0  # features are clipped to this; a failed design may lie far outside

_RECENT_FACTOR = 8  # the memory holds the best of the latest designs, out of this many times its size
_NUM_PARTNERS = 16  # designs examined to find a better one nearby
_MAX_DIFFERENCES = 2**17  # differences between two designs' numbers held in memory at a time
_MAX_NLL = 50.0  # negative log-likelihood of one feature of one move, in nats
_GAIN_EXPONENT = 2.0  # a move from the worst to the best design weighs e to this times one that gains nothing


class FeatureScaling:
    """Scales designs to network features: relative to the mean of good designs, in units of their spread.

    As a search converges, relevant differences become tiny relative to the genes' bounds; scaled, they keep their size.
    `centre` and `scale` are those of the numeric genes, as shares of their ranges; choices become a column per option.
    """

    def __init__(self, genome: Genome, centre: Tensor, scale: Tensor) -> None:
        self.genome = genome
        self.centre = centre
        self.scale = scale
        self.numbers = (~genome.is_choice).nonzero()[:, 0]
        self.choices = [int(gene) for gene in genome.is_choice.nonzero()[:, 0]]
        self.option_sizes = [int(genome.high[gene]) + 1 for gene in self.choices]
        pairs = [(gene, option) for gene in self.choices for option in range(int(genome.high[gene]) + 1)]
        self._gene_of_option, self._index_of_option = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(1)

    @classmethod
    def around(cls, genome: Genome, designs: Tensor) -> Self:
        """Return the scaling for these designs, of which there must be at least one."""
        numbers = ~genome.is_choice
        unit = genome.to_unit(designs)[:, numbers]
        # A step of one in a whole number must remain visible.
        step = torch.where(genome.is_whole, 0.5 / (genome.high - genome.low).clamp(min=1.0), _MIN_SCALE)[numbers]
        centre = unit.mean(0)
        return cls(genome, centre, torch.maximum((unit - centre).square().mean(0).sqrt(), step))

    @classmethod
    def from_state(cls, genome: Genome, state: Mapping[str, Any]) -> Self:
        return cls(genome, state["centre"], state["scale"])

    def state_dict(self) -> dict[str, Tensor]:
        return {"centre": self.centre, "scale": self.scale}

    def numeric_features(self, designs: Tensor) -> Tensor:
        """Return the scaled numbers of each design, not clipped."""
        return (self.genome.to_unit(designs)[:, self.numbers] - self.centre) / self.scale

    def option_features(self, designs: Tensor) -> Tensor:
        """Return the choices of each design, one-hot."""
        return (designs[:, self._gene_of_option] == self._index_of_option).double()

    def features(self, designs: Tensor) -> Tensor:
        """Return the network's input, one row per design: numbers, then options."""
        numbers = self.numeric_features(designs).clamp(-_MAX_FEATURE, _MAX_FEATURE)
        return torch.cat([numbers, self.option_features(designs)], 1).float()

    def designs(self, numbers: Tensor, chosen: Tensor) -> Tensor:
        """Convert scaled numbers, and for each choice a column with the option's index, back to designs."""
        unit = self.centre + numbers * self.scale
        low, high = self.genome.low[self.numbers], self.genome.high[self.numbers]
        designs = torch.empty(len(numbers), len(self.genome), dtype=torch.float64)
        designs[:, self.numbers] = low + unit * (high - low)
        designs[:, self.choices] = chosen
        return self.genome.repair(designs)


class DesignMemory(NamedTuple):
    """The designs that samples are drawn from: good ones, best first, then some that failed."""

    designs: Tensor
    costs: Tensor  # of the good ones, as normal quantiles of their ranks, column by column
    num_good: int

    @classmethod
    def of(cls, archive: DesignArchive, size: int) -> "DesignMemory":
        """Remember the best `size` of the latest designs, and a quarter as many of the latest failures."""
        is_good = archive.is_good
        good = is_good.nonzero()[:, 0][-_RECENT_FACTOR * size :]
        good = good[best_first(archive.costs[good])[:size]]
        failed = (~is_good).nonzero()[:, 0][-max(size // 4, 1) :]
        designs = archive.designs[torch.cat([good, failed])]
        return cls(designs, normal_ranks(archive.costs[good]), len(good))


class TrainingSet(NamedTuple):
    """One row per sample: a design, and the move to a better design near it."""

    features: Tensor
    costs: Tensor
    failed: Tensor
    moves: Tensor  # to the better design's numbers
    options: Tensor  # of the better design
    gains: Tensor  # weight of the move; 0 where no better design was found


def draw_training_set(
    scaling: FeatureScaling, memory: DesignMemory, count: int, generator: torch.Generator
) -> TrainingSet:
    """Draw `count` samples; each looks for a better design among a few partners, and takes the nearest."""
    num_all, num_good = len(memory.designs), memory.num_good
    rows = torch.randint(num_all, (count,), generator=generator)
    partners = torch.randint(num_good, (count, _NUM_PARTNERS), generator=generator)
    numbers, options = scaling.numeric_features(memory.designs), scaling.option_features(memory.designs)
    # In chunks: with a thousand genes, all differences at once would fill gigabytes.
    chunk = max(_MAX_DIFFERENCES // (_NUM_PARTNERS * len(scaling.genome)), 1)
    pairs = zip(rows.split(chunk), partners.split(chunk), strict=True)  # type: ignore[no-untyped-call]
    distance = torch.cat([_squared_distances(numbers, options, *pair) for pair in pairs])
    # The memory is sorted best first, so a lower row is a better design.
    distance = torch.where(partners < rows[:, None], distance, torch.inf)
    nearest = distance.argmin(1, keepdim=True)
    better = partners.gather(1, nearest)[:, 0]
    gain = (rows - better).double() / num_all
    is_found = distance.gather(1, nearest)[:, 0].isfinite()
    failed = rows >= num_good
    costs = torch.where(failed[:, None], 0.0, memory.costs[rows.clamp(max=num_good - 1)])
    return TrainingSet(
        scaling.features(memory.designs)[rows],
        costs.float(),
        failed.float(),
        (numbers[better] - numbers[rows]).float(),
        options[better].float(),
        torch.where(is_found, (_GAIN_EXPONENT * gain).exp(), 0.0).float(),
    )


def _squared_distances(numbers: Tensor, options: Tensor, rows: Tensor, partners: Tensor) -> Tensor:
    """From each row to each of its partners."""
    distance = (numbers[rows][:, None] - numbers[partners]).square().sum(2)
    return distance + (options[rows][:, None] != options[partners]).sum(2)


def training_loss(
    network: SurrogateNetwork,
    samples: TrainingSet,
    option_sizes: Sequence[int],
    value_weight: float,
    policy_weight: float,
) -> Terms:
    """Return the losses summed over samples and members: of costs, of failures, and of moves weighted by their gain."""
    output = network(samples.features)
    is_good = 1.0 - samples.failed
    value = ((output.costs - samples.costs).square().mean(2) * is_good).sum()
    failure = F.binary_cross_entropy_with_logits(
        output.failures, samples.failed.expand_as(output.failures), reduction="sum"
    )
    nll = 0.5 * ((samples.moves - output.moves) / output.log_stds.exp()).square() + output.log_stds
    nll = nll.clamp(max=_MAX_NLL).sum(2)
    by_choice = zip(output.options.split(option_sizes, 2), samples.options.split(option_sizes, 1), strict=True)  # type: ignore[no-untyped-call]
    for logits, option in by_choice:
        nll = nll - (logits.log_softmax(2) * option).sum(2)
    policy = (nll * samples.gains).sum() / samples.features.shape[1]
    count = len(samples.features)
    return {
        "value": (value_weight * value, count),
        "failure": (value_weight * failure, count),
        "policy": (policy_weight * policy, count),
    }


def normal_ranks(costs: Tensor) -> Tensor:
    """Replace each column by the normal quantiles of its ranks; equal costs get equal quantiles."""
    columns = []
    for column in costs.unbind(1):
        _, which, counts = column.unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
        counts = counts.double()
        middle = counts.cumsum(0) - counts / 2
        columns.append((math.sqrt(2) * torch.erfinv(2 * middle / len(column) - 1))[which])
    return torch.stack(columns, 1)
