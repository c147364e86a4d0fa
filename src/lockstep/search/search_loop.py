"""The search loop: evolution guided by a surrogate network, with the same result on any number of ranks.

    problem = Problem(genome, (Objective("error"),), ScalarEvaluator(error_of))
    search = Search(Run("runs/mine", world, seed=7), problem, SearchSettings(population_size=32, max_generations=20))
    result = search.run_complete_pipeline()

Rank 0 makes the first population and broadcasts it. Then, in each generation, all ranks evaluate it and gather the
scores, rank 0 makes and broadcasts the next population, and all ranks train the network together. Run again in the same
folder, a search resumes in the generation that was under way, with the designs that were not evaluated yet.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.config.argument_checks import require_count, require_positive
from lockstep.config.plurals import count_noun
from lockstep.errors import UserError
from lockstep.events.run_folder import RunFolder
from lockstep.search.design_archive import (
    DesignArchive,
    ScoredDesign,
    best_design,
    generation_history,
    generations_without_improvement,
    pareto_front,
    scored_design,
)
from lockstep.search.evaluation_pool import EvaluationInterrupted, EvaluationPool, PopulationScores
from lockstep.search.evaluation_records import EvaluationRecords
from lockstep.search.evolution import Evolution, EvolutionSettings
from lockstep.search.problem import Problem
from lockstep.search.search_strategy import SearchStrategy, ask_for_designs
from lockstep.search.surrogate import Surrogate
from lockstep.search.surrogate_network import NetworkSettings
from lockstep.train.resume.checkpoint_policy import CheckpointPolicy
from lockstep.train.round_loop import Round
from lockstep.train.run import Run
from lockstep.world.object_collectives import broadcast_object, broadcast_value

_MAX_REASONS = 3  # reasons for failures that are logged per generation


@dataclass(frozen=True)
class SearchSettings:
    """How large a search is, when it saves, and when it ends.

    Args:
        population_size: designs per generation, over all ranks.
        max_generations: the search ends after this many.
        save_frequency: generations between two checkpoints.
        keep: how many of the newest checkpoints stay.
        max_runtime_s: the search ends after this time, over all attempts. None: no limit.
        patience: end after this many generations without an improvement. None: do not.
        min_delta: a smaller change of an objective is not an improvement.
        target: end when the first objective reaches this value. None: do not.
        evolution: how designs are varied; its `population_size` is replaced by the one above.
        network: the surrogate network that helps to choose designs. None: evolution alone.
    """

    population_size: int = 64
    max_generations: int = 50
    save_frequency: int = 1
    keep: int = 3
    max_runtime_s: float | None = None
    patience: int | None = None
    min_delta: float = 0.0
    target: float | None = None
    evolution: EvolutionSettings = field(default_factory=EvolutionSettings)
    network: NetworkSettings | None = field(default_factory=NetworkSettings)

    def __post_init__(self) -> None:
        for name in ("population_size", "max_generations", "save_frequency", "keep"):
            require_count(name, getattr(self, name))
        if self.patience is not None:
            require_count("patience", self.patience)
        if self.max_runtime_s is not None:
            require_positive("max_runtime_s", self.max_runtime_s)
        if isinstance(self.min_delta, bool) or not isinstance(self.min_delta, int | float) or not self.min_delta >= 0:
            raise UserError(f"min_delta={self.min_delta!r}: expected a number of 0 or more")

    def numerics(self) -> dict[str, Any]:
        """Return the settings that decide which designs are tried; only the others may change when a search resumes."""
        evolution = asdict(self.evolution)
        del evolution["population_size"]  # the search's own takes its place
        network = None if self.network is None else asdict(self.network)
        return {"population_size": self.population_size, "evolution": evolution, "network": network}

    @property
    def sized_evolution(self) -> EvolutionSettings:
        """The settings of evolution, with the search's population size."""
        return replace(self.evolution, population_size=self.population_size)


class SearchResult(NamedTuple):
    """What a search found; equal on all ranks.

    Attributes:
        best: the best design; with several objectives, a compromise. None if every evaluation failed.
        front: with several objectives, the Pareto front of all evaluated designs; otherwise empty.
        generations: how many were evaluated.
        evaluations: how many designs were evaluated, each once.
        failures: how many of them failed.
        ended: the reason why the search ended.
        digest: the run's digest.
        folder: the run folder, if there is one.
    """

    best: ScoredDesign | None
    front: list[ScoredDesign]
    generations: int
    evaluations: int
    failures: int
    ended: str
    digest: str
    folder: Path | None


class SearchClock:
    """The time that a search has taken, over all attempts."""

    def __init__(self) -> None:
        self._before_s = 0.0
        self._started = time.monotonic()

    def start(self) -> None:
        self._started = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return self._before_s + time.monotonic() - self._started

    def state_dict(self) -> dict[str, float]:
        return {"elapsed_s": self.elapsed_s}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._before_s = state["elapsed_s"]


class Search:
    """A search over designs. All ranks construct it and run it together.

    Example:
        genome = search.Genome([search.FloatGene("x", -5, 5)])
        problem = search.Problem(genome, (search.Objective("cost"),), search.ScalarEvaluator(lambda d: d["x"] ** 2))
        result = search.Search(lockstep.Run("runs/mine", world, seed=7), problem).run_complete_pipeline()

    Run the same script again, and it resumes in the generation that was under way; finished evaluations are not
    repeated.

    Args:
        run: where the search is saved and logged; its seed is the search's.
        problem: the genome, the objectives and the evaluator.
        settings: sizes, saving and stopping; the defaults if omitted.
        strategy: your own strategy, instead of the built-in evolution. Called on rank 0; other ranks copy its state.
    """

    def __init__(
        self,
        run: Run,
        problem: Problem,
        settings: SearchSettings | None = None,
        *,
        strategy: SearchStrategy | None = None,
    ) -> None:
        self.run = run
        self.problem = problem
        self.settings = settings or SearchSettings()
        num_objectives = len(problem.objectives)
        self.archive = DesignArchive(problem.genome, num_objectives)
        self.strategy: SearchStrategy = (
            Evolution(problem.genome, num_objectives, self.settings.sized_evolution, run.seed)
            if strategy is None
            else strategy
        )
        network = self.settings.network
        self.surrogate = (
            None if network is None else Surrogate(problem.genome, num_objectives, network, run.world, run.seed)
        )
        self.population = torch.empty(0, len(problem.genome), dtype=torch.float64)  # to evaluate next
        self.on_end: Callable[[], object] = lambda: None  # called on every rank at the end, before the run is closed
        self._ended = ""  # the reason, once it has ended
        self._front = pareto_front(self.archive)
        self._history: list[dict[str, Any]] = []  # one entry per generation
        self._clock = SearchClock()
        run.register_state("search", self, in_digest=True)
        run.register_state("clock", self._clock)
        if self.surrogate is not None:
            run.register_state("network", self.surrogate, in_digest=True)
        records = EvaluationRecords(None if run.folder is None else RunFolder(run.folder).evaluations, run.world)
        self._pool = EvaluationPool(problem, run.world, run.seed, records)

    def run_complete_pipeline(self, base_params: Mapping[str, Any] | None = None) -> SearchResult:
        """Run the search, or resume it, and return what it found.

        `base_params`: a design, by gene, to include in the first generation.
        """
        base = None if base_params is None else self.problem.genome.row(base_params)
        settings = self.settings
        self.run.run_log.start_info.update(**self._start_info())
        rounds = self.run.rounds(
            settings.max_generations,
            save_every=settings.save_frequency,
            checkpoints=CheckpointPolicy(keep=settings.keep),
            settings={
                **self.problem.description(),
                "strategy": type(self.strategy).__name__,
                **settings.numerics(),
            },
            is_over=lambda: self._has_ended(self.run.step),
        )
        try:
            for number, this_round in enumerate(rounds):
                if number == 0:
                    self._clock.start()
                    self._pool.resume(this_round.number - 1)
                if not len(self.population):
                    self.population = self.broadcast_population(self.create_population(base))
                self._run_generation(this_round)
            result = self._finish()
        except BaseException:
            self._close(abandon=True)
            raise
        self._close(abandon=False)
        return result

    def create_population(self, base: Tensor | None = None) -> Tensor:
        """Return the first population on rank 0, with the given design in it; an empty one on other ranks."""
        if not self.run.world.is_main:
            return self.population
        population = ask_for_designs(self.strategy, self.problem.genome, self.settings.population_size, 0)
        if base is not None:
            population[0] = base
        return population

    def generate_next_population(self, generation: int) -> Tensor:
        """Return the population of that generation on rank 0: from the strategy, and in part chosen by the network."""
        if not self.run.world.is_main:
            return self.population
        count, strategy, genome = self.settings.population_size, self.strategy, self.problem.genome
        if self.surrogate is None:
            return ask_for_designs(strategy, genome, count, generation)
        num_candidates = self.surrogate.num_candidates(count, generation)
        candidates = ask_for_designs(strategy, genome, num_candidates, generation)
        return self.surrogate.choose(candidates, self.archive, strategy.population, strategy.costs, count, generation)

    def broadcast_population(self, population: Tensor) -> Tensor:
        """Return rank 0's population on every rank, and copy the state of its strategy."""
        shared = broadcast_value({"population": population, "strategy": self.strategy.state_dict()})
        if not self.run.world.is_main:
            self.strategy.load_state_dict(shared["strategy"])
        received: Tensor = shared["population"]
        return received

    def train_network(self, generation: int) -> dict[str, float]:
        """Train the surrogate on the archive, on all ranks together, and return its metrics."""
        return {} if self.surrogate is None else self.surrogate.train(self.archive, generation)

    def state_dict(self) -> dict[str, Any]:
        """Return the population, the archive, and the states of the strategy and the network, for checkpoints."""
        return {
            "population": self.population,
            "archive": self.archive.state_dict(),
            "strategy": self.strategy.state_dict(),
            "objectives": self.problem.directions,
            "ended": self._ended,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, if it fits the problem. The run calls it on resume."""
        designs = state["archive"]["designs"]
        if state["objectives"] != self.problem.directions or not self.problem.genome.fits(designs):
            raise UserError("the designs in this folder have other genes, bounds or objectives: choose another folder")
        self.population, self._ended = state["population"], state["ended"]
        self.archive.load_state_dict(state["archive"])
        self.strategy.load_state_dict(state["strategy"])
        self._front, self._history = pareto_front(self.archive), []

    def _close(self, *, abandon: bool) -> None:
        self._pool.close()
        if self.surrogate is not None:
            self.surrogate.close(abandon=abandon)
        self.run.close(abandon=abandon)

    def _run_generation(self, this_round: Round) -> None:
        """Evaluate, evolve, broadcast, train. The state that is saved changes only after all designs are evaluated."""
        generation, started = this_round.number - 1, time.perf_counter()
        num_before = len(self.archive)
        best_before = best_design(self.problem, self.archive, self._front)
        try:
            scores = self._pool.evaluate(self.population, generation, self.archive, lambda: this_round.is_asked_to_stop)
        except EvaluationInterrupted:
            this_round.stop()
        evaluated = time.perf_counter()
        self._front = pareto_front(self.archive, self._front, num_before)
        if self.run.world.is_main:
            self.strategy.tell(self.population, scores.costs)
        self.population = self.broadcast_population(self.generate_next_population(this_round.number))
        evolved = time.perf_counter()
        network_metrics = self.train_network(generation)
        durations = {"evaluate_s": evaluated - started, "evolve_s": evolved - evaluated}
        durations["train_s"] = time.perf_counter() - evolved
        self._log_generation(this_round.number, scores, best_before, {**durations, **network_metrics})
        this_round.is_last = self._has_ended(this_round.number)

    def _has_ended(self, num_generations: int) -> bool:
        self._ended = self._reason_to_end(num_generations) or ""
        return bool(self._ended)

    def _reason_to_end(self, num_generations: int) -> str | None:
        settings = self.settings
        if settings.max_runtime_s is not None and broadcast_object(self._clock.elapsed_s) >= settings.max_runtime_s:
            return f"the time limit of {settings.max_runtime_s / 3600:g} h is reached"
        objective, found = self.problem.objectives[0], self.archive.costs[:, 0].min() * self.problem.signs[0]
        if settings.target is not None and (settings.target - found) * self.problem.signs[0] >= 0:
            return f"{objective.name} has reached {settings.target:g}"
        if settings.patience is not None:
            since = generations_without_improvement(self.archive, num_generations, settings.min_delta)
            if since >= settings.patience:
                return f"no improvement in {count_noun(since, 'generation')}"
        return None

    def _log_generation(
        self, number: int, scores: PopulationScores, before: ScoredDesign | None, numbers: Mapping[str, float]
    ) -> None:
        best = best_design(self.problem, self.archive, self._front)
        self._history = generation_history(self.problem, self.archive, number, self._history)
        self.run.run_log.save_history(self._history)
        is_new = best is not None and (before is None or best.row != before.row)
        self.run.run_log.events.emit(
            "step",
            number,
            **self._history[-1],
            front=len(self._front) if len(self.problem.objectives) > 1 else None,
            found=None if best is None else best.values,
            design=best.design if best is not None and is_new else None,
            reasons=_most_common(scores.failures.values()),
            by_rank=scores.by_rank,
            **{name: round(value, 6) for name, value in numbers.items()},
        )

    def _start_info(self) -> dict[str, Any]:
        """What the run's first event says about the search."""
        genome, settings = self.problem.genome, self.settings
        return {
            "folder": None if self.run.folder is None else str(self.run.folder),
            "genes": len(genome),
            "population": settings.population_size,
            "objectives": self.problem.directions,
            "units": {each.name: each.unit for each in (*genome.genes, *self.problem.objectives) if each.unit},
            "guided": self.surrogate is not None,
        }

    def _finish(self) -> SearchResult:
        best = best_design(self.problem, self.archive, self._front)
        has_several_objectives = len(self.problem.objectives) > 1
        rows = self._front.tolist() if has_several_objectives else []
        result = SearchResult(
            best=best,
            front=[scored_design(self.problem, self.archive, row) for row in rows],
            generations=self.run.step,
            evaluations=len(self.archive),
            failures=len(self.archive.failures),
            ended=self._ended or "all generations are done",
            digest="",
            folder=self.run.folder,
        )
        self.on_end()
        digest = self.run.finish(
            metrics=None if best is None else best.values,
            design=None if best is None else best.design,
            ended=result.ended,
            evaluations=result.evaluations,
            failures=result.failures,
            folder=str(result.folder),
        )
        return result._replace(digest=digest)


def _most_common(reasons: Iterable[str]) -> dict[str, int]:
    return dict(Counter(reasons).most_common(_MAX_REASONS))
