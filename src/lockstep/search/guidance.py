"""Guidance: a network that learns from the designs evaluated so far which to try next.

    guide = Guide(genome, num_objectives=1, settings=NetworkSettings(), world=world, seed=7)
    for generation in range(100):
        candidates = strategy.ask(guide.num_candidates(64, generation), generation)
        designs = guide.choose(candidates, archive, strategy.population, strategy.costs, 64, generation)
        ...                                     # evaluate them, tell the strategy, add them to the archive
        guide.train(archive, generation)

A part of a generation is the strategy's own, as it comes. For each of the other places there are several candidates,
half of them the strategy's and half thought up by the policy, and the one that the value thinks best gets it. A place
has candidates of its own, rather than the best of all places being taken: so not all are of one kind.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lockstep.engine.table import Terms
from lockstep.search.archive import Archive
from lockstep.search.frame import Frame
from lockstep.search.genome import Genome
from lockstep.search.lessons import FEWEST, Lessons, Memory, draw_lessons, lesson_terms, normal_ranks
from lockstep.search.network import GuidanceNetwork
from lockstep.search.network_settings import NetworkSettings
from lockstep.search.proposals import propose
from lockstep.search.selection import best_first
from lockstep.train.run import Run
from lockstep.world.randomness import stream
from lockstep.world.world import World

_LAST_RATE = 0.1  # share of the learning rate that a training ends with
_WEIGHT_DECAY = 1e-4
_TOLD = 512  # lessons that the losses are told of
_COMPARED = 2048  # candidates put in order at a time: with several objectives, twice as many take four times as long
_FEWEST_RANKED = 3  # designs that have an order to speak of


class Guide:
    """All ranks have one; they make it and train it together. What it does depends on the seed and on the archive."""

    def __init__(self, genome: Genome, num_objectives: int, settings: NetworkSettings, world: World, seed: int) -> None:
        self.genome = genome
        self.settings = settings
        self.seed = seed
        self._frame: Frame | None = None  # of the latest training
        shape = Frame.around(genome, genome.low[None])
        network = GuidanceNetwork(
            len(shape.numbers),
            sum(shape.option_sizes),
            num_objectives,
            members=settings.members,
            width=settings.width,
            depth=settings.depth,
            generator=stream(seed, "guidance", "weights"),
        )
        # More ranks than lanes cannot share the training, but each can do all of it, with the same bits.
        alone = World(device=world.device)
        self._run = Run(None, world if world.size <= settings.lanes else alone, seed=seed, sinks=[])
        self._network = self._run.prepare(network)
        make = partial(torch.optim.AdamW, lr=settings.lr, weight_decay=_WEIGHT_DECAY, fused=True)
        self._optimizer = self._run.optimizer(self._network, make, self._rate)

    def train(self, archive: Archive, generation: int) -> dict[str, float]:
        """Learn from what there is after a generation; all ranks together. Returns how well it does.

        `rank_correlation` is of its forecast for the generation, made before it learns from it; the losses are of what
        it has just been taught.
        """
        settings, stage = self.settings, self.settings.stage(generation)
        if settings.is_off or generation % settings.train_every:
            return {}
        foresight = self._foresight(archive, generation)
        memory = Memory.of(archive, settings.memory)
        if memory.num_good < FEWEST:
            return foresight
        self._frame = Frame.around(self.genome, memory.designs[: memory.num_good])
        count = settings.steps * settings.global_batch
        lessons = draw_lessons(self._frame, memory, count, stream(self.seed, "guidance", "lessons", generation))
        loss = partial(
            _loss, option_sizes=self._frame.option_sizes, value_weight=stage.value, policy_weight=stage.policy
        )
        loader = self._run.loader(TensorDataset(*lessons), settings.global_batch, lanes=settings.lanes)
        for step in self._run.open_steps(loader, steps=settings.steps):
            step.accumulate(loss, self._network)
            step.update(self._optimizer)
        return foresight | self._losses(lessons)

    def num_candidates(self, count: int, generation: int) -> int:
        """How many designs to ask of the strategy, to fill so many places."""
        num_guided = self._num_guided(count, generation)
        return count - num_guided + num_guided * (self.settings.candidates // 2)

    def choose(
        self, candidates: Tensor, archive: Archive, population: Tensor, costs: Tensor, count: int, generation: int
    ) -> Tensor:
        """So many designs; none twice and none that was evaluated before, as far as there are others.

        `candidates` are the strategy's, as many as `num_candidates` says; `population` and `costs`, its survivors. One
        rank is enough, and no other is needed for it.
        """
        num_guided = self._num_guided(count, generation)
        is_good = costs.isfinite().all(1)
        if self._frame is None or not num_guided or not is_good.any():
            return candidates[:count]
        generator = stream(self.seed, "guidance", "choice", generation)
        num_proposals = num_guided * (self.settings.candidates - self.settings.candidates // 2)
        proposals = propose(
            self._network, self._frame, population[is_good], num_proposals, self.settings.reach, generator
        )
        designs = torch.cat([candidates, proposals])
        fresh = torch.tensor(list(_fresh(archive, designs)), dtype=torch.int64)
        own, pool = fresh[: count - num_guided], fresh[count - num_guided :]
        pool = pool[torch.randperm(len(pool), generator=generator)]
        chosen = torch.cat([own, pool[self._winners(designs[pool], num_guided)]])
        # A small genome may not have so many new designs.
        others = candidates[: count - len(chosen)]
        return torch.cat([designs[chosen], others])

    def state_dict(self) -> dict[str, Any]:
        frame = None if self._frame is None else self._frame.state_dict()
        return {"run": self._run.state_dict(), "frame": frame}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Between two generations."""
        self._run.load_state_dict(state["run"])
        self._frame = None if state["frame"] is None else Frame.from_state(self.genome, state["frame"])

    def close(self, *, abandon: bool = False) -> None:
        """Let go of the other ranks; `abandon`: without waiting for them."""
        self._run.close(abandon=abandon)

    def _num_guided(self, count: int, generation: int) -> int:
        """None, as long as it knows nothing."""
        return 0 if self._frame is None else self.settings.num_guided(count, generation)

    def _winners(self, pool: Tensor, num_places: int) -> Tensor:
        """The rows of the most promising, one for each place."""
        if len(pool) <= num_places:
            return torch.arange(len(pool))
        per_place = len(pool) // num_places
        rows = torch.arange(num_places * per_place).view(num_places, per_place)
        forecast = self._forecast(pool)
        winners = []
        for places in rows.split(max(_COMPARED // per_place, 1)):  # type: ignore[no-untyped-call]
            standing = torch.empty(places.numel(), dtype=torch.int64)
            standing[best_first(forecast[places.flatten()])] = torch.arange(places.numel())
            winners.append(places.gather(1, standing.view(places.shape).argmin(1, keepdim=True))[:, 0])
        return torch.cat(winners)

    def _forecast(self, designs: Tensor) -> Tensor:
        """What they will cost, on the scale of the latest lessons."""
        assert self._frame is not None
        features = self._frame.features(designs).to(self._network.device)
        return self._network.expected_costs(features).double()

    def _foresight(self, archive: Archive, generation: int) -> dict[str, float]:
        rows = (archive.is_good & (archive.generations == generation)).nonzero()[:, 0]
        if self._frame is None or len(rows) < _FEWEST_RANKED:
            return {}
        found, forecast = normal_ranks(archive.costs[rows]), normal_ranks(self._forecast(archive.designs[rows]))
        scale = (found.square().sum(0) * forecast.square().sum(0)).sqrt()
        if not scale.all():  # all the same
            return {}
        return {"rank_correlation": float(((found * forecast).sum(0) / scale).mean())}

    @torch.no_grad()
    def _losses(self, lessons: Lessons) -> dict[str, float]:
        assert self._frame is not None
        some = Lessons(*(part[:_TOLD].to(self._network.device) for part in lessons))
        terms = lesson_terms(self._network, some, self._frame.option_sizes, 1.0, 1.0)
        return {
            f"{name}_loss": float(total) / self.settings.members / len(some.costs) for name, (total, _) in terms.items()
        }

    def _rate(self, step: int) -> float:
        """Each training's rate falls in a straight line."""
        return 1.0 - (1.0 - _LAST_RATE) * (step % self.settings.steps) / self.settings.steps


def _loss(
    network: GuidanceNetwork,
    batch: Sequence[Tensor],
    option_sizes: Sequence[int],
    value_weight: float,
    policy_weight: float,
) -> Terms:
    return lesson_terms(network, Lessons(*batch), option_sizes, value_weight, policy_weight)


def _fresh(archive: Archive, designs: Tensor) -> Iterator[int]:
    """The rows of those that are new, each once."""
    seen: set[bytes] = set()
    for row, (key, found) in enumerate(zip(archive.genome.keys(designs), archive.find(designs), strict=True)):
        if found is None and key not in seen:
            seen.add(key)
            yield row
