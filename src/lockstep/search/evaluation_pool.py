"""The evaluation pool: every design of a generation is evaluated exactly once, by whichever rank is free.

The designs are cut into batches, the same on any number of ranks, and each rank takes the next batch when it is free: a
slow design or a slow rank delays nobody else. How long a batch takes and which rank evaluates it change no bit.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from lockstep.config.plurals import count_noun
from lockstep.search.design_archive import DesignArchive
from lockstep.search.evaluation_records import DesignBatch, EvaluationRecords
from lockstep.search.problem import Evaluation, Problem
from lockstep.supervision import heartbeat
from lockstep.supervision.heartbeat import Phase
from lockstep.world.keyed_random import key_of, preserve_rng_states
from lockstep.world.object_collectives import SharedCounters, all_gather_object
from lockstep.world.world import World

# How long to sleep between two checks of whether the other ranks are done.
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.0005, 0.05
_PAUSE_SHARE = 0.01  # of the time already waited: the most that polling can add

_STOP = 1 << 40  # added to the counter of taken batches, so that no rank takes another


class PopulationScores(NamedTuple):
    """The scores of a population, one row per design; equal on all ranks."""

    costs: Tensor  # smaller is better; inf where the evaluation failed
    failures: dict[int, str]  # row → reason
    num_evaluated: int  # the other designs were in the archive
    by_rank: list[int]  # designs evaluated by each rank in this attempt


class EvaluationInterrupted(Exception):
    """A stop was requested before all designs were evaluated. The finished evaluations are on record."""


class EvaluationPool:
    """Evaluates populations. All ranks construct it and call it together.

    Args:
        problem: the genome, the objectives and the evaluator.
        world: this process's place in the job.
        seed: the search's seed, from which each evaluation's own is derived.
        records: where evaluations are written as soon as they are finished.
    """

    def __init__(self, problem: Problem, world: World, seed: int, records: EvaluationRecords) -> None:
        self._problem = problem
        self._world = world
        self._seed = seed
        self._records = records
        self._counters = SharedCounters(world)
        self._earlier: dict[str, list[Evaluation]] = {}  # batches that earlier attempts finished

    def resume(self, generation: int) -> None:
        """Load the evaluations that earlier attempts finished, from this generation on."""
        self._earlier = self._records.find(generation)

    def evaluate(
        self,
        population: Tensor,
        generation: int,
        archive: DesignArchive,
        is_asked_to_stop: Callable[[], bool] = lambda: False,
    ) -> PopulationScores:
        """Evaluate the designs that are not in the archive, add them to it, and return the scores of all.

        Raises `EvaluationInterrupted` on all ranks if any rank is asked to stop.
        """
        self._forget_counters(generation - 1)
        batches = self._batches(population, generation, archive)
        finished = {batch.number: self._earlier[batch.key] for batch in batches if self._is_on_record(batch)}
        todo = [batch for batch in batches if batch.number not in finished]
        own = self._work(todo, generation, is_asked_to_stop)
        by_rank = []
        for packed in all_gather_object(_pack(own, len(self._problem.objectives))):
            by_rank.append(len(packed["values"]))
            finished |= _unpack(packed)
        if len(finished) < len(batches):
            raise EvaluationInterrupted
        self._add_to_archive(batches, finished, generation, archive)
        rows = torch.tensor([row for row in archive.find(population) if row is not None])
        return PopulationScores(
            costs=archive.costs[rows],
            failures={
                place: archive.failures[row] for place, row in enumerate(rows.tolist()) if row in archive.failures
            },
            num_evaluated=sum(len(batch.rows) for batch in batches),
            by_rank=by_rank,
        )

    def close(self) -> None:
        self._records.close()

    def _batches(self, population: Tensor, generation: int, archive: DesignArchive) -> list[DesignBatch]:
        """The new designs, each once, in batches that depend only on the population and the archive."""
        first = {key: row for row, key in reversed(list(enumerate(self._problem.genome.keys(population))))}
        known = archive.find(population)
        new = sorted(row for row in first.values() if known[row] is None)
        size = self._problem.evaluator.batch
        rows_by_batch = [new[start : start + size] for start in range(0, len(new), size)]
        designs = torch.split(self._problem.genome.repair(population[new]), size)
        return [DesignBatch(generation, number, rows, designs[number]) for number, rows in enumerate(rows_by_batch)]

    def _is_on_record(self, batch: DesignBatch) -> bool:
        """Whether the whole batch is on record, undamaged and for the same objectives."""
        found = self._earlier.get(batch.key, [])
        return len(found) == len(batch.rows) and all(self._checked(each) == each for each in found)

    def _work(
        self, todo: Sequence[DesignBatch], generation: int, is_asked_to_stop: Callable[[], bool]
    ) -> dict[int, list[Evaluation]]:
        """Take batches until none is left, then wait for the other ranks to finish theirs, even when stopping.

        The wait polls instead of using a collective: a collective has a timeout, and an evaluation has none.
        """
        own = {}
        taken, done = _counter_names(generation)
        with heartbeat.during(Phase.DESIGNS), preserve_rng_states(cuda=True):  # each evaluation seeds them
            while (place := self._counters.add(taken) - 1) < len(todo):
                heartbeat.enter(Phase.DESIGNS)
                own[todo[place].number] = self._evaluate(todo[place])
                if is_asked_to_stop():
                    self._counters.add(taken, _STOP)
            self._counters.add(done)
            for pause_s in _pauses():
                if self._counters.read(done) >= self._world.size:
                    break
                heartbeat.enter(Phase.AWAITING_DESIGNS)  # this rank only waits: a slow or hung rank is another one
                time.sleep(pause_s)
                if is_asked_to_stop():
                    self._counters.add(taken, _STOP)
        return own

    def _forget_counters(self, generation: int) -> None:
        """Delete the counters of a generation whose scores have been gathered: no rank uses them any more."""
        if self._world.is_main:
            for name in _counter_names(generation):
                self._counters.forget(name)

    def _evaluate(self, batch: DesignBatch) -> list[Evaluation]:
        problem, started = self._problem, time.perf_counter()
        keys = [key_of(self._seed, "design", batch.generation, row) for row in batch.rows]
        with evaluation_context(), _forbid_exit():
            evaluations = problem.evaluator.evaluate(problem.genome, batch.designs, keys)
        checked = [self._checked(each) for each in evaluations]
        self._records.add(batch, checked, time.perf_counter() - started)
        return checked

    def _checked(self, evaluation: Evaluation) -> Evaluation:
        """Turn anything but one finite number per objective into a failure."""
        objectives = self._problem.objectives
        if evaluation.failure is not None:
            return evaluation
        if len(evaluation.values) != len(objectives):
            values, wanted = count_noun(len(evaluation.values), "value"), count_noun(len(objectives), "objective")
            return Evaluation(failure=f"{values} for {wanted}")
        for objective, value in zip(objectives, evaluation.values, strict=True):
            if value - value != 0:  # NaN or infinite
                return Evaluation(failure=f"{objective.name} is {value}")
        return evaluation

    def _add_to_archive(
        self,
        batches: Sequence[DesignBatch],
        finished: Mapping[int, Sequence[Evaluation]],
        generation: int,
        archive: DesignArchive,
    ) -> None:
        if not batches:
            return
        evaluations = [each for batch in batches for each in finished[batch.number]]
        worst = (torch.inf,) * len(self._problem.objectives)
        signs = self._problem.signs
        values = torch.tensor([each.values or worst for each in evaluations], dtype=torch.float64)
        costs = torch.where(values.isinf(), values, values * signs)
        failures = {row: each.failure for row, each in enumerate(evaluations) if each.failure is not None}
        archive.add(torch.cat([batch.designs for batch in batches]), costs, generation, failures)


class _ProcessState(NamedTuple):
    """The process-wide settings that a user's function may change."""

    working_directory: Path | None  # None: it has been deleted
    num_threads: int
    default_dtype: torch.dtype
    is_grad_enabled: bool
    is_deterministic: bool
    is_warn_only: bool  # about operations that are not deterministic

    @classmethod
    def current(cls) -> Self:
        try:
            working_directory = Path.cwd()
        except FileNotFoundError:
            working_directory = None
        return cls(
            working_directory,
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )

    def restore(self) -> None:
        if self.working_directory is not None:
            os.chdir(self.working_directory)
        torch.set_num_threads(self.num_threads)
        torch.set_default_dtype(self.default_dtype)
        torch.set_grad_enabled(self.is_grad_enabled)
        torch.use_deterministic_algorithms(self.is_deterministic, warn_only=self.is_warn_only)


@contextmanager
def evaluation_context() -> Iterator[None]:
    """Restore the working directory and torch's threads, default dtype, gradient mode and determinism afterwards.

    Without this, a function that changes one of them would make later designs on this rank run under other settings
    than on another rank, and the run would go on writing to another folder.
    """
    before = _ProcessState.current()
    try:
        yield
    finally:
        if _ProcessState.current() != before:
            before.restore()


@contextmanager
def _forbid_exit() -> Iterator[None]:
    """Turn `sys.exit` into an error: a rank that exits with code 0 would look as if its search had ended."""
    try:
        yield
    except SystemExit as exit:
        raise RuntimeError(f"an evaluation called sys.exit({exit.code!r}): raise an error instead") from exit


def _pack(own: Mapping[int, Sequence[Evaluation]], num_objectives: int) -> dict[str, Any]:
    """Pack evaluations into one tensor: sending thousands one by one could take longer than computing them."""
    evaluations = [each for done in own.values() for each in done]
    blank = (torch.nan,) * num_objectives
    return {
        "pieces": [(number, len(done)) for number, done in own.items()],
        "values": torch.tensor([each.values or blank for each in evaluations], dtype=torch.float64),
        "failures": {row: each.failure for row, each in enumerate(evaluations) if each.failure is not None},
    }


def _unpack(packed: Mapping[str, Any]) -> dict[int, list[Evaluation]]:
    values, failures = packed["values"].tolist(), packed["failures"]
    evaluations = iter(
        Evaluation(failure=failures[row]) if row in failures else Evaluation(tuple(numbers))
        for row, numbers in enumerate(values)
    )
    return {number: list(islice(evaluations, length)) for number, length in packed["pieces"]}


def _counter_names(generation: int) -> tuple[str, str]:
    """The generation's counters: batches taken, each by one rank; and ranks that have finished theirs."""
    return f"{generation}/taken", f"{generation}/done"


def _pauses() -> Iterator[float]:
    began = time.monotonic()
    while True:
        yield min(max(_MIN_PAUSE_S, _PAUSE_SHARE * (time.monotonic() - began)), _MAX_PAUSE_S)
