"""Searches on several ranks: every design once, work for whichever rank is free, and the same bits on any number."""

import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.errors import Stopped
from lockstep.events.jsonl import read_jsonl
from lockstep.search.design_archive import DesignArchive
from lockstep.search.evaluation_pool import EvaluationInterrupted, EvaluationPool
from lockstep.search.evaluation_records import EvaluationRecords
from lockstep.search.evaluators import ScalarEvaluator
from lockstep.search.problem import Objective, Problem
from lockstep.search.search_loop import Search, SearchSettings
from lockstep.search.surrogate_network import NetworkSettings
from lockstep.testing import ranks
from lockstep.train.run import Run
from lockstep.world.object_collectives import all_gather_object
from lockstep.world.world import World
from tests.ranks.search_workloads import GENOME, NETWORK, ONE, cost_of, searched


def evaluated(world: World, population_size: int, slow_rank: int | None) -> tuple[list[str], list[int], list[float]]:
    """Return what this rank evaluated, how many each rank evaluated, and the costs."""
    mine = []

    def cost(design: dict[str, Any]) -> float:
        mine.append(repr(design))
        time.sleep(0.2 if world.rank == slow_rank else 0.002)
        return float(design["x0"])

    problem = Problem(GENOME, (Objective("cost", "max"),), ScalarEvaluator(cost))
    designs = GENOME.sample(population_size, torch.Generator().manual_seed(population_size))
    archive = DesignArchive(GENOME, 1)
    pool = EvaluationPool(problem, world, 7, EvaluationRecords(None, world))
    scores = pool.evaluate(torch.cat([designs, designs]), 0, archive)  # each twice: evaluated once
    assert scores.num_evaluated == len(archive) == population_size
    assert torch.equal(scores.costs[:population_size], scores.costs[population_size:])
    assert torch.equal(scores.costs[:population_size, 0], -designs[:, 0])
    again = pool.evaluate(designs, 1, archive)
    assert again.num_evaluated == 0
    return mine, scores.by_rank, scores.costs.flatten().tolist()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("population_size", [1, 2, 7, 20])
def test_every_design_is_evaluated_exactly_once(num_ranks: int, population_size: int) -> None:
    answers = ranks(num_ranks).run(evaluated, population_size, None)
    designs = [design for mine, _, _ in answers for design in mine]
    assert len(designs) == len(set(designs)) == population_size
    assert [len(mine) for mine, _, _ in answers] == answers[0][1]
    assert all(costs == answers[0][2] for _, _, costs in answers)


def test_a_slow_rank_delays_no_other() -> None:
    (_, by_rank, _), _ = ranks(2).run(evaluated, 30, 1)
    assert by_rank[1] <= 3
    assert sum(by_rank) == 30


def stopped_while_another_is_slow(world: World) -> float:
    """Return when rank 0, which is to stop, starts to gather; and when rank 1 has finished its slower design."""
    noted = []

    def cost(design: dict[str, Any]) -> float:
        time.sleep(0.5 * world.rank)
        noted.append(time.monotonic())
        return 0.0

    def gather(value: Any) -> list[Any]:
        noted.append(time.monotonic())
        return all_gather_object(value)

    problem = Problem(GENOME, (Objective("cost"),), ScalarEvaluator(cost))
    pool = EvaluationPool(problem, world, 7, EvaluationRecords(None, world))
    all_gather_object(None)  # both begin now
    with pytest.MonkeyPatch.context() as patch, pytest.raises(EvaluationInterrupted):
        patch.setattr("lockstep.search.evaluation_pool.all_gather_object", gather)
        designs = GENOME.sample(2000, torch.Generator().manual_seed(1))
        is_asked = world.is_main
        pool.evaluate(designs, 0, DesignArchive(GENOME, 1), lambda: is_asked and time.monotonic() > noted[0] + 0.1)
    return noted[-1] if is_asked else noted[0]


def test_a_stopping_rank_waits_for_a_slow_design_outside_any_collective() -> None:
    """A collective has a time limit."""
    gathers, has_ended = ranks(2).run(stopped_while_another_is_slow)
    assert gathers >= has_ended


@pytest.mark.parametrize("problem", ["one", "several"])
def test_any_number_of_ranks_finds_the_same(tmp_path: Path, problem: str) -> None:
    answers = [
        answer
        for num_ranks in (1, 2, 3)
        for answer in ranks(num_ranks).run(searched, str(tmp_path / f"{num_ranks}"), problem)
    ]
    assert all(answer == answers[0] for answer in answers)
    _, (best, evaluations, failures, _) = answers[0]
    assert best is not None
    assert evaluations > 26
    assert 0 < failures < evaluations


def left_behind(world: World, folder: str) -> list[tuple[int, int]]:
    """Return the numbers of threads and connections after a search, and after another."""
    counts = []
    for number in range(2):
        searched(world, f"{folder}/{number}", "one")
        counts.append((threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))))
    return counts


def test_a_search_leaves_no_thread_and_no_connection_behind(tmp_path: Path) -> None:
    for (threads, files), (more_threads, more_files) in ranks(2).run(left_behind, str(tmp_path)):
        assert more_threads == threads
        assert more_files <= files, "fewer if connections of an earlier test were still closing"


def stopped(world: World, folder: str, after: int) -> str:
    """Ask the first rank that has made this many evaluations to stop; which rank that is depends on the machine."""
    made = 0

    def cost(design: dict[str, Any]) -> float:
        nonlocal made
        made += 1
        if made == after:
            os.kill(os.getpid(), signal.SIGTERM)
        return cost_of(design)

    search = Search(
        Run(folder, world, seed=5, sinks=[]),
        Problem(GENOME, ONE.objectives, ScalarEvaluator(cost)),
        SearchSettings(population_size=13, max_generations=4, network=NETWORK),
    )
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        search.run_complete_pipeline()
    except Stopped as error:
        return str(error)
    finally:
        signal.signal(signal.SIGTERM, before)
    return "not stopped"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_stop_inside_a_generation_loses_no_finished_evaluation(tmp_path: Path, num_ranks: int) -> None:
    left_alone = ranks(1).run(searched, str(tmp_path / "alone"), "one")[0]
    for message in ranks(num_ranks).run(stopped, str(tmp_path / "stopped"), 16 if num_ranks == 1 else 9):
        assert "as requested" in message
    assert ranks(3 - num_ranks).run(searched, str(tmp_path / "stopped"), "one")[0] == left_alone
    lines = [line for path in (tmp_path / "stopped" / "evaluations").iterdir() for line in read_jsonl(path)]
    assert set(Counter(line["key"] for line in lines).values()) == {1}
    assert {line["generation"] for line in lines} == {0, 1, 2, 3}


def test_more_ranks_than_the_network_has_lanes(tmp_path: Path) -> None:
    network = NetworkSettings(lanes=2, global_batch=16, steps=6)
    answers = [
        answer
        for num_ranks in (1, 2, 3)
        for answer in ranks(num_ranks).run(searched, str(tmp_path / f"{num_ranks}"), "one", 4, network)
    ]
    assert all(answer == answers[0] for answer in answers)
