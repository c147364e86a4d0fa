"""The evaluation pool: every design of a generation evaluated exactly once, by whichever rank is free.

Designs are cut into pieces, the same on any number of ranks, and ranks take one piece after another: a slow design or a
slow rank holds nobody else. What a piece costs, or who evaluates it, changes no bit of the result.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.search.archive import Archive
from lockstep.search.problem import Evaluation, Problem
from lockstep.search.records import Piece, Records
from lockstep.search.surroundings import undisturbed_surroundings
from lockstep.supervision import pulse
from lockstep.supervision.pulse import Phase
from lockstep.world.objects import all_gather_object
from lockstep.world.randomness import key_of, undisturbed_streams
from lockstep.world.shared_counters import SharedCounters
from lockstep.world.world import World

# Between two looks at whether the others are done.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.05
_PAUSE_SHARE = 0.01  # of how long it has waited: so much is lost at most

_STOP = 1 << 40  # added to the pieces that were taken: none is left then


class Scores(NamedTuple):
    """Of a population, a row a design; equal on all ranks."""

    costs: Tensor  # smaller is better; inf where the evaluation failed
    failures: dict[int, str]  # by row, the reason
    num_evaluated: int  # the others were known
    by_rank: list[int]  # so many of them each; those of earlier attempts are nobody's


class Interrupted(Exception):
    """A stop was asked for before all were evaluated. What is finished is on record."""


class Pool:
    """`records`: where what is finished is written down at once. All ranks make it, and call it, together."""

    def __init__(self, problem: Problem, world: World, seed: int, records: Records) -> None:
        self._problem = problem
        self._world = world
        self._seed = seed
        self._records = records
        self._counters = SharedCounters(world)
        self._earlier: dict[str, list[Evaluation]] = {}  # pieces that earlier attempts have finished

    def resume(self, generation: int) -> None:
        """Take up what earlier attempts have finished, from this generation on."""
        self._earlier = self._records.find(generation)

    def evaluate(
        self,
        population: Tensor,
        generation: int,
        archive: Archive,
        is_asked_to_stop: Callable[[], bool] = lambda: False,
    ) -> Scores:
        """Also adds to the archive what was not there. `Interrupted`, on all ranks, if one was asked to stop."""
        self._forget(generation - 1)
        pieces = self._cut(population, generation, archive)
        finished = {piece.number: self._earlier[piece.key] for piece in pieces if self._is_on_record(piece)}
        todo = [piece for piece in pieces if piece.number not in finished]
        own = self._work(todo, generation, is_asked_to_stop)
        by_rank = []
        for packet in all_gather_object(_packed(own, len(self._problem.objectives))):
            by_rank.append(len(packet["values"]))
            finished |= _unpacked(packet)
        if len(finished) < len(pieces):
            raise Interrupted
        self._add(pieces, finished, generation, archive)
        rows = torch.tensor([row for row in archive.find(population) if row is not None])
        return Scores(
            costs=archive.costs[rows],
            failures={
                place: archive.failures[row] for place, row in enumerate(rows.tolist()) if row in archive.failures
            },
            num_evaluated=sum(len(piece.rows) for piece in pieces),
            by_rank=by_rank,
        )

    def close(self) -> None:
        self._records.close()

    def _cut(self, population: Tensor, generation: int, archive: Archive) -> list[Piece]:
        """What is new, each design once, in pieces that hang on the population and the archive alone."""
        first = {key: row for row, key in reversed(list(enumerate(self._problem.genome.keys(population))))}
        known = archive.find(population)
        new = sorted(row for row in first.values() if known[row] is None)
        size = self._problem.evaluator.batch
        parts = [new[start : start + size] for start in range(0, len(new), size)]
        designs = torch.split(self._problem.genome.repair(population[new]), size)
        return [Piece(generation, number, rows, designs[number]) for number, rows in enumerate(parts)]

    def _is_on_record(self, piece: Piece) -> bool:
        """In full: a record may be damaged, or of other objectives."""
        found = self._earlier.get(piece.key, [])
        return len(found) == len(piece.rows) and all(self._checked(each) == each for each in found)

    def _work(
        self, todo: Sequence[Piece], generation: int, is_asked_to_stop: Callable[[], bool]
    ) -> dict[int, list[Evaluation]]:
        """Take pieces until none is left, then wait for those that others have taken, also where it is to stop.

        Not in a collective: that has a time limit, and an evaluation has none.
        """
        own = {}
        taken, through = _counters(generation)
        with pulse.during(Phase.DESIGNS), undisturbed_streams(cuda=True):  # each evaluation seeds them
            while (place := self._counters.add(taken) - 1) < len(todo):
                pulse.enter(Phase.DESIGNS)
                own[todo[place].number] = self._evaluate(todo[place])
                if is_asked_to_stop():
                    self._counters.add(taken, _STOP)
            self._counters.add(through)
            for pause_s in _pauses():
                if self._counters.add(through, 0) >= self._world.size:
                    break
                pulse.enter(Phase.AWAITING_DESIGNS)  # a sign of life: it is another that is slow, or hangs
                time.sleep(pause_s)
                if is_asked_to_stop():
                    self._counters.add(taken, _STOP)
        return own

    def _forget(self, generation: int) -> None:
        """All ranks have left it: they have gathered its scores."""
        if self._world.is_main:
            for name in _counters(generation):
                self._counters.forget(name)

    def _evaluate(self, piece: Piece) -> list[Evaluation]:
        problem, started = self._problem, time.perf_counter()
        keys = [key_of(self._seed, "design", piece.generation, row) for row in piece.rows]
        with undisturbed_surroundings(), _exits_are_errors():
            evaluations = problem.evaluator.evaluate(problem.genome, piece.designs, keys)
        checked = [self._checked(each) for each in evaluations]
        self._records.add(piece, checked, time.perf_counter() - started)
        return checked

    def _checked(self, evaluation: Evaluation) -> Evaluation:
        """What is not one finite number for each objective is a failure."""
        objectives = self._problem.objectives
        if evaluation.failure is not None:
            return evaluation
        if len(evaluation.values) != len(objectives):
            return Evaluation(failure=f"{len(evaluation.values)} values for {len(objectives)} objectives")
        for objective, value in zip(objectives, evaluation.values, strict=True):
            if value - value != 0:  # NaN or infinite
                return Evaluation(failure=f"{objective.name} is {value}")
        return evaluation

    def _add(
        self, pieces: Sequence[Piece], finished: Mapping[int, Sequence[Evaluation]], generation: int, archive: Archive
    ) -> None:
        if not pieces:
            return
        evaluations = [each for piece in pieces for each in finished[piece.number]]
        worst = (torch.inf,) * len(self._problem.objectives)
        signs = self._problem.signs
        values = torch.tensor([each.values or worst for each in evaluations], dtype=torch.float64)
        costs = torch.where(values.isinf(), values, values * signs)
        failures = {row: each.failure for row, each in enumerate(evaluations) if each.failure is not None}
        archive.add(torch.cat([piece.designs for piece in pieces]), costs, generation, failures)


@contextmanager
def _exits_are_errors() -> Iterator[None]:
    """A rank that left here with code 0 would look as if the search were over."""
    try:
        yield
    except SystemExit as exit:
        raise RuntimeError(f"an evaluation has called sys.exit({exit.code!r}): raise an error instead") from exit


def _packed(own: Mapping[int, Sequence[Evaluation]], num_objectives: int) -> dict[str, Any]:
    """As few tensors: of thousands of designs, values by themselves would take longer to send than to compute."""
    evaluations = [each for done in own.values() for each in done]
    blank = (torch.nan,) * num_objectives
    return {
        "pieces": [(number, len(done)) for number, done in own.items()],
        "values": torch.tensor([each.values or blank for each in evaluations], dtype=torch.float64),
        "failures": {row: each.failure for row, each in enumerate(evaluations) if each.failure is not None},
    }


def _unpacked(packet: Mapping[str, Any]) -> dict[int, list[Evaluation]]:
    values, failures = packet["values"].tolist(), packet["failures"]
    each = iter(
        Evaluation(failure=failures[row]) if row in failures else Evaluation(tuple(numbers))
        for row, numbers in enumerate(values)
    )
    return {number: list(islice(each, length)) for number, length in packet["pieces"]}


def _counters(generation: int) -> tuple[str, str]:
    """Of a generation: pieces that were taken, each by one rank, and ranks that are through with theirs."""
    return f"{generation}/taken", f"{generation}/through"


def _pauses() -> Iterator[float]:
    began = time.monotonic()
    while True:
        yield min(max(_SHORTEST_PAUSE_S, _PAUSE_SHARE * (time.monotonic() - began)), _LONGEST_PAUSE_S)
