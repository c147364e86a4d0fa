"""A search that is killed resumes where it was, and repeats no finished evaluation."""

import json
import os
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.events.jsonl import read_jsonl
from tests.commands import LOCKSTEP, free_port, run, started, wait_for

# PAUSE_S: how long an evaluation takes at least; for runs that are to be killed in the middle of a generation.
RECIPE = """
import os
import time

import torch

from lockstep import search


PAUSE_S = float(os.environ.get("PAUSE_S", "0"))


def cost(design):
    time.sleep(PAUSE_S * (1 + 3 * torch.rand(()).item() ** 3))
    if design["kind"] == "broken" and design["x0"] > 2:
        raise ZeroDivisionError("no such thing")
    return sum(value**2 for value in design.values() if isinstance(value, float)) + torch.rand(()).item()


class Recipe:
    config_class = search.SearchConfig

    def problem(self, config):
        genes = [search.FloatGene(f"x{number}", -5, 5, group=str(number // 2)) for number in range(6)]
        genome = search.Genome([*genes, search.ChoiceGene("kind", ("sound", "broken"))])
        return search.Problem(genome, (search.Objective("cost"),), search.ScalarEvaluator(cost))


recipe = Recipe()
"""

CONFIG = """
recipe: planted:recipe
max_generations: 5
population_size: 21
save_frequency: 2
network: {steps: 5}
"""


PAUSES = {"PAUSE_S": "0.05"}


def planted(folder: Path) -> dict[str, str]:
    (folder / "planted.py").write_text(RECIPE)
    (folder / "planted.yaml").write_text(CONFIG)
    (folder / "memory").mkdir()
    return {"LOCKSTEP_MEMORY": str(folder / "memory")}


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return [line for path in sorted((folder / "evaluations").glob("*.jsonl")) for line in read_jsonl(path)]


def is_in_the_middle(folder: Path, generation: int) -> bool:
    return Counter(line["generation"] for line in evaluations(folder))[generation] > 5


def digest(folder: Path) -> str:
    return str([event for event in read_jsonl(folder / "events.jsonl") if event["kind"] == "end"][-1]["digest"])


def test_a_kill_inside_a_generation_loses_only_evaluations_in_flight(tmp_path: Path, alone: Path) -> None:
    environment = planted(tmp_path)
    killed = tmp_path / "killed"
    command = [*LOCKSTEP, "train", "planted.yaml", "--run", str(killed)]
    for num_processes, generation in (("3", 1), ("2", 3)):  # of the second, the generations since a save are replayed
        with started([*command, "-n", num_processes], tmp_path, environment | PAUSES) as launcher:
            # Some of the generation's designs are done, and some are not.
            wait_for(partial(is_in_the_middle, killed, generation), 60, "the middle of a generation")
            processes = psutil.Process(launcher.pid).children(recursive=True)
            os.kill(launcher.pid, signal.SIGKILL)
            psutil.wait_procs(processes, timeout=10)
        finished = Counter(line["key"] for line in evaluations(killed))
        assert 21 * generation < len(finished) < 21 * (generation + 1)
    assert run(command, tmp_path, environment).code == 0
    assert digest(killed) == digest(alone)
    keys = Counter(line["key"] for line in evaluations(killed))
    assert keys.keys() == {line["key"] for line in evaluations(alone)}
    assert set(keys.values()) == {1}
    assert json.loads((killed / "history.json").read_text()) == json.loads((alone / "history.json").read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the same search, undisturbed, in one process."""
    folder = tmp_path_factory.mktemp("alone")
    finished = run([*LOCKSTEP, "train", "planted.yaml", "--run", "alone"], folder, planted(folder))
    assert finished.code == 0, finished.err
    return folder / "alone"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_chaos_finds_nothing_lost(tmp_path: Path) -> None:
    environment = planted(tmp_path) | PAUSES  # seed 2 plans two kills for when designs are being evaluated
    command = [*LOCKSTEP, "chaos", "planted.yaml", "--kills", "8", "--seed", "2", "-n", "3", "--json", "--keep", "kept"]
    finished = run(command, tmp_path, environment, timeout_s=390)
    assert finished.code == 0, finished.out + finished.err
    verdict = json.loads(finished.out)
    assert verdict["kills"] == 8
    assert "the same designs were evaluated, and no finished one again" in {c["name"] for c in verdict["checks"]}
    assert verdict["phases"].keys() & {"designs", "awaiting_designs"}  # one of the two may find its rank a moment later


def test_two_launchers_search_as_one(tmp_path: Path, alone: Path) -> None:
    """As two machines would."""
    environment = planted(tmp_path)
    command = [*LOCKSTEP, "train", "planted.yaml", "--run", "together", "-n", "1", "--nnodes", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--node-rank"]
    with started([*command, "1"], tmp_path, environment):
        finished = run([*command, "0"], tmp_path, environment)
    assert finished.code == 0, finished.err
    assert digest(tmp_path / "together") == digest(alone)
    assert len(list((tmp_path / "together" / "evaluations").iterdir())) == 2
