"""The loop of a search: evolution with a network trained alongside, the same on any number of ranks.

    problem = Problem(genome, (Objective("error"),), OneByOne(error_of))
    search = Search(Run("runs/mine", world, seed=7), problem, SearchSettings(population_size=32, max_generations=20))
    result = search.run_complete_pipeline()

Rank 0 makes the first population, and it reaches every rank; then, generation after generation, all ranks evaluate it,
all learn the scores, rank 0 makes the next population, which reaches every rank, and all train the network together.
Run again in the same folder, a search goes on where it was: with the generation that was under way, and in it with the
designs that were not evaluated yet.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.config.arguments import require_count, require_positive
from lockstep.errors import UserError
from lockstep.search import course
from lockstep.search.archive import Archive
from lockstep.search.clock import Clock
from lockstep.search.evolution import Evolution, EvolutionSettings
from lockstep.search.guidance import Guide
from lockstep.search.network_settings import NetworkSettings
from lockstep.search.pool import Interrupted, Pool, Scores
from lockstep.search.problem import Problem
from lockstep.search.records import Records
from lockstep.search.strategy import Strategy, ask
from lockstep.train.checkpoints import Saving
from lockstep.train.rounds import Round
from lockstep.train.run import Run
from lockstep.world.objects import broadcast_object, broadcast_value

_MOST_REASONS = 3  # for failures, that are told


@dataclass(frozen=True)
class SearchSettings:
    population_size: int = 64  # designs a generation
    max_generations: int = 50
    save_frequency: int = 1  # generations between two checkpoints
    keep: int = 3  # of the newest checkpoints
    max_runtime_s: float | None = None  # over all attempts; then the search ends with what it has
    patience: int | None = None  # generations without an improvement; then too
    min_delta: float = 0.0  # less than this is none
    target: float | None = None  # of the first objective; when it is reached, too
    evolution: EvolutionSettings = field(default_factory=EvolutionSettings)
    network: NetworkSettings | None = field(default_factory=NetworkSettings)  # None: evolution alone

    def __post_init__(self) -> None:
        for name in ("population_size", "max_generations", "save_frequency", "keep"):
            require_count(name, getattr(self, name))
        if self.patience is not None:
            require_count("patience", self.patience)
        if self.max_runtime_s is not None:
            require_positive("max_runtime_s", self.max_runtime_s)
        if isinstance(self.min_delta, bool) or not isinstance(self.min_delta, int | float) or not self.min_delta >= 0:
            raise UserError(f"min_delta={self.min_delta!r}: expected a number from 0")

    def numerics(self) -> dict[str, Any]:
        """What decides which designs there are; the rest may change when a search goes on."""
        evolution = asdict(self.evolution)
        del evolution["population_size"]  # the search's counts
        network = None if self.network is None else asdict(self.network)
        return {"population_size": self.population_size, "evolution": evolution, "network": network}

    @property
    def breeding(self) -> EvolutionSettings:
        """Evolution's, with the population that the search has."""
        return replace(self.evolution, population_size=self.population_size)


class SearchResult(NamedTuple):
    """Equal on all ranks."""

    best: course.Found | None  # design and values; None if every evaluation failed
    front: list[course.Found]  # of several objectives: those between which there is no better
    generations: int
    evaluations: int
    failures: int
    ended: str  # why
    digest: str
    folder: Path | None


class Search:
    """`strategy`: another than the built-in evolution. It lives on rank 0 alone; others have a copy of its state."""

    def __init__(
        self, run: Run, problem: Problem, settings: SearchSettings | None = None, *, strategy: Strategy | None = None
    ) -> None:
        self.run = run
        self.problem = problem
        self.settings = settings or SearchSettings()
        self.archive = Archive(problem.genome, len(problem.objectives))
        self.strategy: Strategy = (
            Evolution(problem.genome, len(problem.objectives), self.settings.breeding, run.seed)
            if strategy is None
            else strategy
        )
        network = self.settings.network
        self.guide = (
            None if network is None else Guide(problem.genome, len(problem.objectives), network, run.world, run.seed)
        )
        self.population = torch.empty(0, len(problem.genome), dtype=torch.float64)  # that is evaluated next
        self.before_the_end: Callable[[], object] = lambda: None  # called on every rank, while the run is open
        self._ended = ""  # why, once it has
        self._front = course.front(self.archive)
        self._history: list[dict[str, Any]] = []  # a line a generation
        self._clock = Clock()
        run.keep("search", self, in_digest=True)
        run.keep("clock", self._clock)
        if self.guide is not None:
            run.keep("network", self.guide, in_digest=True)
        folder = run.journal.folder
        records = Records(None if folder is None else folder.evaluations, run.world)
        self._pool = Pool(problem, run.world, run.seed, records)

    def run_complete_pipeline(self, base_params: Mapping[str, Any] | None = None) -> SearchResult:
        """Search, or go on; `base_params`: a design to begin with, by its genes' names."""
        base = None if base_params is None else self.problem.genome.row(base_params)
        settings = self.settings
        self.run.tell_at_start(**self._facts())
        rounds = self.run.rounds(
            settings.max_generations,
            save_every=settings.save_frequency,
            saving=Saving(keep=settings.keep),
            settings={
                **self.problem.described(),
                "strategy": type(self.strategy).__name__,
                **settings.numerics(),
            },
            is_over=lambda: self._is_to_end(self.run.step),
        )
        try:
            for number, each in enumerate(rounds):
                if number == 0:
                    self._clock.start()
                    self._pool.resume(each.number - 1)
                if not len(self.population):
                    self.population = self.broadcast_population(self.create_population(base))
                self._make_generation(each)
            result = self._conclude()
        except BaseException:
            self._close(abandon=True)
            raise
        self._close(abandon=False)
        return result

    def create_population(self, base: Tensor | None = None) -> Tensor:
        """The first one, on rank 0, with a given design in it; elsewhere none."""
        if not self.run.world.is_main:
            return self.population
        population = ask(self.strategy, self.problem.genome, self.settings.population_size, 0)
        if base is not None:
            population[0] = base
        return population

    def generate_next_population(self, generation: int) -> Tensor:
        """For that generation, on rank 0: some as evolution has it, some that the network has proposed or chosen."""
        if not self.run.world.is_main:
            return self.population
        count, strategy = self.settings.population_size, self.strategy
        if self.guide is None:
            return ask(self.strategy, self.problem.genome, count, generation)
        candidates = ask(self.strategy, self.problem.genome, self.guide.num_candidates(count, generation), generation)
        return self.guide.choose(candidates, self.archive, strategy.population, strategy.costs, count, generation)

    def broadcast_population(self, population: Tensor) -> Tensor:
        """Rank 0's, on every rank, with what its strategy then knows."""
        shared = broadcast_value({"population": population, "strategy": self.strategy.state_dict()})
        if not self.run.world.is_main:
            self.strategy.load_state_dict(shared["strategy"])
        received: Tensor = shared["population"]
        return received

    def train_network(self, generation: int) -> dict[str, float]:
        """On all that was evaluated, by all ranks together; what it has learnt, in numbers."""
        return {} if self.guide is None else self.guide.train(self.archive, generation)

    def state_dict(self) -> dict[str, Any]:
        return {
            "population": self.population,
            "archive": self.archive.state_dict(),
            "strategy": self.strategy.state_dict(),
            "objectives": self.problem.directions,
            "ended": self._ended,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        designs = state["archive"]["designs"]
        if state["objectives"] != self.problem.directions or not self.problem.genome.fits(designs):
            raise UserError(
                "the designs in this folder are of other genes, bounds or objectives: choose another folder"
            )
        self.population, self._ended = state["population"], state["ended"]
        self.archive.load_state_dict(state["archive"])
        self.strategy.load_state_dict(state["strategy"])
        self._front, self._history = course.front(self.archive), []

    def _close(self, *, abandon: bool) -> None:
        self._pool.close()
        if self.guide is not None:
            self.guide.close(abandon=abandon)
        self.run.close(abandon=abandon)

    def _make_generation(self, each: Round) -> None:
        """Evaluate, gather, evolve, broadcast, train. Until all is evaluated nothing that is saved changes."""
        generation, started = each.number - 1, time.perf_counter()
        num_before = len(self.archive)
        best_before = course.best(self.problem, self.archive, self._front)
        try:
            scores = self._pool.evaluate(self.population, generation, self.archive, lambda: each.is_asked_to_stop)
        except Interrupted:
            each.stop()
        evaluated = time.perf_counter()
        self._front = course.front(self.archive, self._front, num_before)
        if self.run.world.is_main:
            self.strategy.tell(self.population, scores.costs)
        self.population = self.broadcast_population(self.generate_next_population(each.number))
        evolved = time.perf_counter()
        learnt = self.train_network(generation)
        seconds = {"evaluate_s": evaluated - started, "evolve_s": evolved - evaluated}
        seconds["train_s"] = time.perf_counter() - evolved
        self._tell(each.number, scores, best_before, {**seconds, **learnt})
        each.is_last = self._is_to_end(each.number)

    def _is_to_end(self, num_generations: int) -> bool:
        self._ended = self._reason_to_end(num_generations) or ""
        return bool(self._ended)

    def _reason_to_end(self, num_generations: int) -> str | None:
        settings = self.settings
        if settings.max_runtime_s is not None and broadcast_object(self._clock.elapsed_s) >= settings.max_runtime_s:
            return f"its time, {settings.max_runtime_s / 3600:g} hours, is over"
        objective, found = self.problem.objectives[0], self.archive.costs[:, 0].min() * self.problem.signs[0]
        if settings.target is not None and (settings.target - found) * self.problem.signs[0] >= 0:
            return f"{objective.name} has reached {settings.target:g}"
        if settings.patience is not None:
            since = course.generations_without_improvement(self.archive, num_generations, settings.min_delta)
            if since >= settings.patience:
                return f"no improvement in {since} generations"
        return None

    def _tell(self, number: int, scores: Scores, before: course.Found | None, numbers: Mapping[str, float]) -> None:
        best = course.best(self.problem, self.archive, self._front)
        self._history = course.history(self.problem, self.archive, number, self._history)
        self.run.journal.save_history(self._history)
        is_new = best is not None and (before is None or best.row != before.row)
        self.run.journal.events.emit(
            "step",
            number,
            **self._history[-1],
            front=len(self._front) if len(self.problem.objectives) > 1 else None,
            found=None if best is None else best.values,
            design=best.design if best is not None and is_new else None,
            reasons=_counted(scores.failures.values()),
            by_rank=scores.by_rank,
            **{name: round(value, 6) for name, value in numbers.items()},
        )

    def _facts(self) -> dict[str, Any]:
        genome, settings = self.problem.genome, self.settings
        folder = self.run.journal.folder
        return {
            "folder": None if folder is None else str(folder.path),
            "genes": len(genome),
            "population": settings.population_size,
            "objectives": self.problem.directions,
            "units": {each.name: each.unit for each in (*genome.genes, *self.problem.objectives) if each.unit},
            "guided": self.guide is not None,
        }

    def _conclude(self) -> SearchResult:
        best = course.best(self.problem, self.archive, self._front)
        several = len(self.problem.objectives) > 1
        rows = self._front.tolist() if several else []
        folder = self.run.journal.folder
        result = SearchResult(
            best=best,
            front=[course.found(self.problem, self.archive, row) for row in rows],
            generations=self.run.step,
            evaluations=len(self.archive),
            failures=len(self.archive.failures),
            ended=self._ended or f"all {self.run.step} generations are made",
            digest="",
            folder=None if folder is None else folder.path,
        )
        self.before_the_end()
        digest = self.run.finish(
            metrics=None if best is None else best.values,
            design=None if best is None else best.design,
            **{name: getattr(result, name) for name in ("ended", "evaluations", "failures")},
            folder=str(result.folder),
        )
        return result._replace(digest=digest)


def _counted(reasons: Iterable[str]) -> dict[str, int]:
    """The most frequent."""
    return dict(Counter(reasons).most_common(_MOST_REASONS))
