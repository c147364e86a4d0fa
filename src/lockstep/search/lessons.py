"""What the guidance network is taught: designs with what they cost, and the way from each to a better one near it.

A training goes by a table of so many lessons, drawn from the archive. So its length does not depend on the archive's,
and neither does what a training costs.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.table import Terms
from lockstep.search.archive import Archive
from lockstep.search.frame import Frame
from lockstep.search.network import GuidanceNetwork
from lockstep.search.selection import best_first

FEWEST = 8  # good designs, without which there is nothing to be taught
_RECENT = 8  # times the memory: of so many designs, the newest, the best are remembered
_PARTNERS = 16  # that are looked at to find a better design near by
_DIFFERENCES = 2**17  # between numbers of two designs, that are held at a time
_MOST_SURPRISE = 50.0  # of one number of one move
_KEENNESS = 2.0  # how much more a move counts that leads from the worst to the best than one that gains nothing


class Memory(NamedTuple):
    """The designs that lessons are drawn from: the good ones, best first, and then some that failed."""

    designs: Tensor
    costs: Tensor  # of the good ones, as normal deviates of their ranks, column by column
    num_good: int

    @classmethod
    def of(cls, archive: Archive, size: int) -> "Memory":
        is_good = archive.is_good
        good = is_good.nonzero()[:, 0][-_RECENT * size :]
        good = good[best_first(archive.costs[good])[:size]]
        failed = (~is_good).nonzero()[:, 0][-max(size // 4, 1) :]
        designs = archive.designs[torch.cat([good, failed])]
        return cls(designs, normal_ranks(archive.costs[good]), len(good))


class Lessons(NamedTuple):
    """A row is a design; a better one near it stands beside it."""

    features: Tensor
    costs: Tensor
    failed: Tensor
    moves: Tensor  # to the better one's numbers
    options: Tensor  # the better one's
    gains: Tensor  # how much the move counts; 0 where no better one was found


def draw_lessons(frame: Frame, memory: Memory, count: int, generator: torch.Generator) -> Lessons:
    num_all, num_good = len(memory.designs), memory.num_good
    rows = torch.randint(num_all, (count,), generator=generator)
    partners = torch.randint(num_good, (count, _PARTNERS), generator=generator)
    numbers, options = frame.numbers_of(memory.designs), frame.options_of(memory.designs)
    # Some at a time: of a thousand genes, the differences of all would fill gigabytes.
    some = max(_DIFFERENCES // (_PARTNERS * len(frame.genome)), 1)
    pairs = zip(rows.split(some), partners.split(some), strict=True)  # type: ignore[no-untyped-call]
    distance = torch.cat([_distances(numbers, options, *pair) for pair in pairs])
    # Rows stand best first, so the lower is the better.
    distance = torch.where(partners < rows[:, None], distance, torch.inf)
    nearest = distance.argmin(1, keepdim=True)
    better = partners.gather(1, nearest)[:, 0]
    gain = (rows - better).double() / num_all
    found = distance.gather(1, nearest)[:, 0].isfinite()
    failed = rows >= num_good
    costs = torch.where(failed[:, None], 0.0, memory.costs[rows.clamp(max=num_good - 1)])
    return Lessons(
        frame.features(memory.designs)[rows],
        costs.float(),
        failed.float(),
        (numbers[better] - numbers[rows]).float(),
        options[better].float(),
        torch.where(found, (_KEENNESS * gain).exp(), 0.0).float(),
    )


def _distances(numbers: Tensor, options: Tensor, rows: Tensor, partners: Tensor) -> Tensor:
    """From each row to each of its partners, squared."""
    distance = (numbers[rows][:, None] - numbers[partners]).square().sum(2)
    return distance + (options[rows][:, None] != options[partners]).sum(2)


def lesson_terms(
    network: GuidanceNetwork, lessons: Lessons, option_sizes: Sequence[int], value_weight: float, policy_weight: float
) -> Terms:
    """The loss, summed over members: of costs and failures, and of moves by what they gain."""
    outlook = network(lessons.features)
    taught = 1.0 - lessons.failed
    value = ((outlook.costs - lessons.costs).square().mean(2) * taught).sum()
    failure = F.binary_cross_entropy_with_logits(
        outlook.failures, lessons.failed.expand_as(outlook.failures), reduction="sum"
    )
    surprise = 0.5 * ((lessons.moves - outlook.moves) / outlook.spreads.exp()).square() + outlook.spreads
    surprise = surprise.clamp(max=_MOST_SURPRISE).sum(2)
    parts = zip(outlook.options.split(option_sizes, 2), lessons.options.split(option_sizes, 1), strict=True)  # type: ignore[no-untyped-call]
    for log_odds, option in parts:
        surprise = surprise - (log_odds.log_softmax(2) * option).sum(2)
    policy = (surprise * lessons.gains).sum() / lessons.features.shape[1]
    count = len(lessons.features)
    return {
        "value": (value_weight * value, count),
        "failure": (value_weight * failure, count),
        "policy": (policy_weight * policy, count),
    }


def normal_ranks(costs: Tensor) -> Tensor:
    """Each column's ranks as a normal distribution would have them; equal costs get the same."""
    columns = []
    for column in costs.unbind(1):
        _, which, counts = column.unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
        counts = counts.double()
        middle = counts.cumsum(0) - counts / 2
        columns.append((math.sqrt(2) * torch.erfinv(2 * middle / len(column) - 1))[which])
    return torch.stack(columns, 1)
