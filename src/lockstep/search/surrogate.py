"""The surrogate: a network that learns from evaluated designs and chooses which to try next.

    surrogate = Surrogate(genome, num_objectives=1, settings=NetworkSettings(), world=world, seed=7)
    for generation in range(100):
        candidates = strategy.ask(surrogate.num_candidates(64, generation), generation)
        designs = surrogate.choose(candidates, archive, strategy.population, strategy.costs, 64, generation)
        ...                                     # evaluate them, tell the strategy, add them to the archive
        surrogate.train(archive, generation)

Part of each generation is the strategy's, unchanged. For each of the other places there are several candidates, half
from the strategy and half proposed by the policy head, and the one with the best predicted value gets the place. Each
place has its own candidates, which keeps the generation more diverse than taking the best of all candidates.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lockstep.engine.loss_table import Terms
from lockstep.search.design_archive import DesignArchive
from lockstep.search.genome import Genome
from lockstep.search.pareto import best_first
from lockstep.search.surrogate_network import MIN_TRAINING_DESIGNS, NetworkSettings, SurrogateNetwork
from lockstep.search.training_set import (
    DesignMemory,
    FeatureScaling,
    TrainingSet,
    draw_training_set,
    normal_ranks,
    training_loss,
)
from lockstep.train.run import Run
from lockstep.world.keyed_random import keyed_generator
from lockstep.world.world import World

_FINAL_LR_SHARE = 0.1  # of the learning rate that a training starts with
_WEIGHT_DECAY = 1e-4
_NUM_REPORTED = 512  # samples for the reported losses
_MAX_COMPARED = 2048  # candidates ranked at a time: with several objectives the time grows with the square
_MIN_RANKED = 3  # designs needed for a rank correlation


class Surrogate:
    """Trains the network and guides the choice of designs. Its results depend on the seed and the archive alone.

    All ranks construct it and train it together.
    """

    def __init__(self, genome: Genome, num_objectives: int, settings: NetworkSettings, world: World, seed: int) -> None:
        self.genome = genome
        self.settings = settings
        self.seed = seed
        self._scaling: FeatureScaling | None = None  # of the latest training
        shape = FeatureScaling.around(genome, genome.low[None])
        network = SurrogateNetwork(
            len(shape.numbers),
            sum(shape.option_sizes),
            num_objectives,
            members=settings.members,
            width=settings.width,
            depth=settings.depth,
            generator=keyed_generator(seed, "guidance", "weights"),
        )
        # If there are more ranks than lanes, each rank does all of the training, with the same bits.
        alone = World(device=world.device)
        self._run = Run(None, world if world.size <= settings.lanes else alone, seed=seed, sinks=[])
        self._network = self._run.prepare(network)
        make = partial(torch.optim.AdamW, lr=settings.lr, weight_decay=_WEIGHT_DECAY, fused=True)
        self._optimizer = self._run.optimizer(self._network, make, self._lr_factor)

    def train(self, archive: DesignArchive, generation: int) -> dict[str, float]:
        """Train on the archive after a generation, on all ranks together, and return metrics.

        `rank_correlation` compares the costs of this generation with those predicted before training on them.
        The losses are computed after the training, on its samples.
        """
        settings, stage = self.settings, self.settings.stage(generation)
        if settings.is_off or generation % settings.train_every:
            return {}
        metrics = self._rank_correlation(archive, generation)
        memory = DesignMemory.of(archive, settings.memory)
        if memory.num_good < MIN_TRAINING_DESIGNS:
            return metrics
        self._scaling = FeatureScaling.around(self.genome, memory.designs[: memory.num_good])
        count = settings.steps * settings.global_batch
        samples = draw_training_set(
            self._scaling, memory, count, keyed_generator(self.seed, "guidance", "lessons", generation)
        )
        loss = partial(
            _batch_loss, option_sizes=self._scaling.option_sizes, value_weight=stage.value, policy_weight=stage.policy
        )
        loader = self._run.loader(TensorDataset(*samples), settings.global_batch, lanes=settings.lanes)
        for step in self._run.steps(loader, steps=settings.steps, finish=False):
            step.accumulate(loss, self._network)
            step.update(self._optimizer)
        return metrics | self._losses(samples)

    def num_candidates(self, count: int, generation: int) -> int:
        """Return how many designs to ask of the strategy, so that `choose` can fill `count` places."""
        num_guided = self._num_guided(count, generation)
        return count - num_guided + num_guided * (self.settings.candidates // 2)

    def choose(
        self,
        candidates: Tensor,
        archive: DesignArchive,
        population: Tensor,
        costs: Tensor,
        count: int,
        generation: int,
    ) -> Tensor:
        """Return `count` designs: distinct ones that were not evaluated before, if there are enough.

        One rank can call this alone.

        Args:
            candidates: the strategy's proposals, as many as `num_candidates` says.
            archive: all designs evaluated so far.
            population: the strategy's survivors, from which the policy proposes moves.
            costs: the costs of `population`.
            count: how many designs to return.
            generation: the generation that they are for.
        """
        num_guided = self._num_guided(count, generation)
        is_good = costs.isfinite().all(1)
        if self._scaling is None or not num_guided or not is_good.any():
            return candidates[:count]
        generator = keyed_generator(self.seed, "guidance", "choice", generation)
        num_proposals = num_guided * (self.settings.candidates - self.settings.candidates // 2)
        proposals = propose(
            self._network, self._scaling, population[is_good], num_proposals, self.settings.reach, generator
        )
        designs = torch.cat([candidates, proposals])
        new = torch.tensor(list(_new_rows(archive, designs)), dtype=torch.int64)
        unguided, pool = new[: count - num_guided], new[count - num_guided :]
        pool = pool[torch.randperm(len(pool), generator=generator)]
        chosen = torch.cat([unguided, pool[self._winners(designs[pool], num_guided)]])
        # A small genome may have too few new designs.
        others = candidates[: count - len(chosen)]
        return torch.cat([designs[chosen], others])

    def state_dict(self) -> dict[str, Any]:
        scaling = None if self._scaling is None else self._scaling.state_dict()
        return {"run": self._run.state_dict(), "frame": scaling}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; call it between two generations."""
        self._run.load_state_dict(state["run"])
        self._scaling = None if state["frame"] is None else FeatureScaling.from_state(self.genome, state["frame"])

    def close(self, *, abandon: bool = False) -> None:
        """Disconnect from the other ranks; with `abandon`, without waiting for them."""
        self._run.close(abandon=abandon)

    def _num_guided(self, count: int, generation: int) -> int:
        """How many designs the network guides; 0 until it has been trained."""
        return 0 if self._scaling is None else self.settings.num_guided(count, generation)

    def _winners(self, pool: Tensor, num_places: int) -> Tensor:
        """Divide the pool among the places, and return the row with the best predicted costs for each."""
        if len(pool) <= num_places:
            return torch.arange(len(pool))
        per_place = len(pool) // num_places
        rows = torch.arange(num_places * per_place).view(num_places, per_place)
        predicted = self._predict_costs(pool)
        winners = []
        for places in rows.split(max(_MAX_COMPARED // per_place, 1)):  # type: ignore[no-untyped-call]
            rank = torch.empty(places.numel(), dtype=torch.int64)
            rank[best_first(predicted[places.flatten()])] = torch.arange(places.numel())
            winners.append(places.gather(1, rank.view(places.shape).argmin(1, keepdim=True))[:, 0])
        return torch.cat(winners)

    def _predict_costs(self, designs: Tensor) -> Tensor:
        """Predict costs, on the scale of the latest training set."""
        assert self._scaling is not None
        features = self._scaling.features(designs).to(self._network.device)
        return self._network.expected_costs(features).double()

    def _rank_correlation(self, archive: DesignArchive, generation: int) -> dict[str, float]:
        rows = (archive.is_good & (archive.generations == generation)).nonzero()[:, 0]
        if self._scaling is None or len(rows) < _MIN_RANKED:
            return {}
        actual, predicted = normal_ranks(archive.costs[rows]), normal_ranks(self._predict_costs(archive.designs[rows]))
        scale = (actual.square().sum(0) * predicted.square().sum(0)).sqrt()
        if not scale.all():  # all costs are equal
            return {}
        return {"rank_correlation": float(((actual * predicted).sum(0) / scale).mean())}

    @torch.no_grad()
    def _losses(self, samples: TrainingSet) -> dict[str, float]:
        assert self._scaling is not None
        first = TrainingSet(*(tensor[:_NUM_REPORTED].to(self._network.device) for tensor in samples))
        terms = training_loss(self._network, first, self._scaling.option_sizes, 1.0, 1.0)
        return {
            f"{name}_loss": float(total) / self.settings.members / len(first.costs)
            for name, (total, _) in terms.items()
        }

    def _lr_factor(self, step: int) -> float:
        """Lower the learning rate linearly over each training."""
        return 1.0 - (1.0 - _FINAL_LR_SHARE) * (step % self.settings.steps) / self.settings.steps


def propose(
    network: SurrogateNetwork,
    scaling: FeatureScaling,
    parents: Tensor,
    count: int,
    reach: float,
    generator: torch.Generator,
) -> Tensor:
    """Return `count` designs, each a move drawn from a random member's policy, starting at a random parent.

    No feature moves by more than `reach`: the network can only be trusted near the designs it has seen.
    """
    with torch.no_grad():
        output = network(scaling.features(parents).to(network.device))
    members = torch.randint(len(output.moves), (count,), generator=generator)
    rows = torch.randint(len(parents), (count,), generator=generator)
    moves, log_stds, options = (
        tensor.cpu()[members, rows].double() for tensor in (output.moves, output.log_stds, output.options)
    )
    noise = torch.randn(moves.shape, generator=generator, dtype=torch.float64)
    moves = (moves + log_stds.exp() * noise).clamp(-reach, reach)
    return scaling.designs(scaling.numeric_features(parents)[rows] + moves, _draw_options(scaling, options, generator))


def _draw_options(scaling: FeatureScaling, logits: Tensor, generator: torch.Generator) -> Tensor:
    """Draw an option's index for each choice, by the Gumbel-max trick."""
    drawn = torch.rand(logits.shape, generator=generator, dtype=torch.float64).clamp(min=1e-300)
    perturbed = logits - (-drawn.log()).log()
    chosen = torch.empty(len(logits), len(scaling.choices), dtype=torch.float64)
    by_choice = perturbed.split(scaling.option_sizes, 1)  # type: ignore[no-untyped-call]
    for column, options in enumerate(by_choice):
        chosen[:, column] = options.argmax(1).double()
    return chosen


def _batch_loss(
    network: SurrogateNetwork,
    batch: Sequence[Tensor],
    option_sizes: Sequence[int],
    value_weight: float,
    policy_weight: float,
) -> Terms:
    return training_loss(network, TrainingSet(*batch), option_sizes, value_weight, policy_weight)


def _new_rows(archive: DesignArchive, designs: Tensor) -> Iterator[int]:
    """The rows of designs that are not in the archive, each design once."""
    seen: set[bytes] = set()
    for row, (key, found) in enumerate(zip(archive.genome.keys(designs), archive.find(designs), strict=True)):
        if found is None and key not in seen:
            seen.add(key)
            yield row
