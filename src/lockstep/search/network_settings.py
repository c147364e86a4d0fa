"""What can be chosen about the guidance network, and how that changes in the course of a search."""

import math
from dataclasses import dataclass

from lockstep.config.arguments import require_count, require_positive, require_share, require_whole
from lockstep.errors import UserError
from lockstep.search.lessons import FEWEST


@dataclass(frozen=True)
class Stage:
    """What holds from a generation on: how much the losses of value and policy weigh, and how much is guided."""

    generation: int = 0
    value: float = 1.0
    policy: float = 1.0
    guided_share: float | None = None  # None: as the settings have it

    def __post_init__(self) -> None:
        require_whole("generation", self.generation)
        for name in ("value", "policy"):
            weight = getattr(self, name)
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
                raise UserError(f"{name}={weight!r}: expected the weight of a loss, a number from 0")
        if self.guided_share is not None:
            require_share("guided_share", self.guided_share)


@dataclass(frozen=True)
class NetworkSettings:
    """`candidates` and `guided_share` are how much the network is asked for; `reach` and `memory`, how bold it is."""

    train_every: int = 1  # generations
    steps: int = 60  # updates of a training
    global_batch: int = 128  # lessons of an update
    lanes: int = 4  # the most processes that share its training; with more, each trains it by itself
    lr: float = 6e-3  # a training begins with it, and ends with a tenth
    members: int = 4  # networks side by side, whose mean counts
    width: int = 64  # of their layers
    depth: int = 2  # how many of these
    memory: int = 256  # it learns from so many designs: the best of the latest
    guided_share: float = 0.5  # of the offspring; the others are the strategy's, as they are
    candidates: int = 16  # screened for each guided place: half of them the strategy's, half thought up
    reach: float = 2.0  # how far from a design it may propose others, in deviations of the remembered ones
    curriculum: tuple[Stage, ...] = ()  # in order; what comes before its first stage is as `Stage()` has it

    def __post_init__(self) -> None:
        for name in ("train_every", "steps", "global_batch", "lanes", "members", "width", "depth", "memory"):
            require_count(name, getattr(self, name))
        if self.lanes & (self.lanes - 1):
            raise UserError(f"lanes={self.lanes}: expected a power of two")
        if self.memory < FEWEST:
            raise UserError(f"memory={self.memory}: expected {FEWEST} or more, or there is nothing to learn from")
        for name in ("lr", "reach"):
            require_positive(name, getattr(self, name))
            if math.isinf(getattr(self, name)):
                raise UserError(f"{name}=inf: expected a number that has an end")
        require_share("guided_share", self.guided_share)
        if self.global_batch % self.lanes:
            raise UserError(f"global_batch={self.global_batch}: expected a multiple of lanes={self.lanes}")
        require_whole("candidates", self.candidates)
        if self.candidates < 2:
            raise UserError(f"candidates={self.candidates}: expected 2 or more, or there is nothing to choose from")
        object.__setattr__(self, "curriculum", tuple(self.curriculum))
        first = [stage.generation for stage in self.curriculum]
        if first != sorted(set(first)):
            raise UserError(f"curriculum: stages from generations {first}: expected each to begin after the one before")

    def stage(self, generation: int) -> Stage:
        """The one that a generation is in."""
        begun = [stage for stage in self.curriculum if stage.generation <= generation]
        return begun[-1] if begun else Stage()

    def num_guided(self, count: int, generation: int) -> int:
        """Of so many offspring."""
        share = self.stage(generation).guided_share
        return round(count * (self.guided_share if share is None else share))

    @property
    def is_off(self) -> bool:
        """Is nothing ever guided?"""
        shares = [self.guided_share if stage.guided_share is None else stage.guided_share for stage in self.curriculum]
        starts_later = not self.curriculum or self.curriculum[0].generation > 0
        return not any(shares) and not (starts_later and self.guided_share)
