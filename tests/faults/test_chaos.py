"""`lockstep chaos` through the real command: a job that survives many kills, and jobs that do lose something."""

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.chaos.fault_plan import draw_fault_plan
from tests.commands import LOCKSTEP, call, descendants, is_running, run, started, wait_for
from tests.planted import COUNTER, FAILS, UNSEEDED_DATA, plant, temporary

CONFIG = """
recipe: planted:recipe
epochs: 10
batch: {global: 16}
lanes: 4
tail: short
workers: 1
average: {decay: 0.9}
checkpoint: {every: 3 steps}
"""

HALVES = (198, 288)  # seeds: together, their plans kill every kind of target at every moment, at least twice

# Otherwise a step is over before a process could be killed in it.
SLOW_STEPS = "Recipe.pause_s = 0.005\n"


def prepared(folder: Path, *options: str, planted: str = "") -> tuple[list[str], dict[str, str]]:
    environment = plant(folder, CONFIG, SLOW_STEPS + planted) | {"LOCKSTEP_MEMORY": str(folder / "memory")}
    (folder / "memory").mkdir()
    return [*LOCKSTEP, "chaos", "planted.yaml", *options], environment


def read_all(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def survive(folder: Path, kills: int, seed: int, *options: str, timeout_s: float) -> dict[str, Any]:
    """Run the command, which must find nothing lost, and return its JSON output."""
    arguments = ["--kills", str(kills), "--seed", str(seed), "--keep", "kept", "--json", *options]
    command, environment = prepared(folder, *arguments)
    finished = run(command, folder, environment, timeout_s=timeout_s)
    assert finished.code == 0, finished.out + finished.err
    verdict: dict[str, Any] = json.loads(finished.out)
    assert verdict["ok"]
    assert verdict["kills"] == kills
    assert verdict["gave_up"] == 0
    assert not any(check["faults"] for check in verdict["checks"])
    assert len(verdict["checks"]) == 8
    faults = read_all(folder / "kept" / "attacks.jsonl")
    # A kill that comes too late for its target is tried again, a pause is not.
    done = [fault["number"] for fault in faults if fault["is_hit"] or fault["act"] == "stop, then let go on"]
    assert done == list(range(1, len(written_plan(folder)) + 1))
    assert len({fault["pid"] for fault in faults if fault["act"] == "kill"}) > 1
    assert not list((folder / "memory").iterdir())
    return verdict


def written_plan(folder: Path) -> list[dict[str, Any]]:
    return read_all(folder / "kept" / "plan.jsonl")


def reached(folder: Path, name: str) -> set[Any]:
    return {fault[name] for fault in read_all(folder / "kept" / "attacks.jsonl")}


@pytest.mark.timeout(420)
def test_eight_kills_and_nothing_is_lost(tmp_path: Path) -> None:
    """With this seed, few kills cover every kind of target, every act and every moment, and the job is resized."""
    verdict = survive(tmp_path, 8, 849, "epochs=5", timeout_s=400)
    assert {"rank 0", "launcher", "fork server", "data worker", "everything"} <= verdict["victims"].keys()
    assert reached(tmp_path, "processes") == {1, 2}, "it was resized"
    assert {"start", "step", "save", "evaluation"} <= reached(tmp_path, "moment")
    assert {"kill", "stop, then kill", "stop, then let go on"} == reached(tmp_path, "act")
    end = json.loads((tmp_path / "kept" / "reference" / "events.jsonl").read_text().splitlines()[-1])
    plan = draw_fault_plan(849, 8, processes=2, steps=end["step"], with_data_workers=True)
    assert [fault.as_json() for fault in plan] == written_plan(tmp_path), "the plan depends on the seed alone"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", HALVES)
def test_a_hundred_kills_and_nothing_is_lost(tmp_path: Path, seed: int) -> None:
    """Fifty in each half, so that two test processes can share the work."""
    verdict = survive(tmp_path, 50, seed, "-n", "3", timeout_s=850)
    assert len(reached(tmp_path, "processes")) > 1, "it was resized"
    assert {"start", "step", "save", "evaluation"} <= reached(tmp_path, "moment")
    # In which phase a rank was when it was killed depends on the machine.
    assert len({"starting", "saving", "computing", "evaluating"} & verdict["phases"].keys()) > 1


def lose(folder: Path, planted: str) -> tuple[str, Path]:
    """Run the command, which must find something lost, and return its output and where the runs were kept."""
    # With this seed, one rank is killed in a step after the first checkpoint.
    arguments = ["epochs=3", "workers=0", "--kills", "1", "--seed", "170"]
    command, environment = prepared(folder, *arguments, planted=planted)
    finished = run(command, folder, environment, timeout_s=160)
    assert finished.code == 3, finished.out + finished.err
    assert "something was lost" in finished.out
    (kept,) = temporary(folder).glob("lockstep-chaos-*")
    assert f"are in {kept}" in finished.out
    assert not list((folder / "memory").iterdir())
    return finished.out, kept


def problems_of(out: str, check: str) -> Sequence[str]:
    lines = out.splitlines()
    at = next(number for number, line in enumerate(lines) if check in line)
    assert lines[at].startswith("FAIL ")
    return [line.strip() for line in lines[at + 1 :] if line.startswith("      ")]


def test_a_counter_that_no_checkpoint_holds_is_found(tmp_path: Path) -> None:
    out, kept = lose(tmp_path, COUNTER)
    problems = problems_of(out, "every step of every attempt had the same samples")
    assert "its loss differs from the undisturbed run" in problems[0]
    assert "expected {" in problems_of(out, "the digest of the undisturbed run")[0]
    assert (kept / "attacks.jsonl").exists()


@pytest.mark.slow
def test_samples_that_are_not_keyed_are_found(tmp_path: Path) -> None:
    out, _ = lose(tmp_path, UNSEEDED_DATA)
    problems = problems_of(out, "every step of every attempt had the same samples")
    assert problems[0] == "round 1: step 1: its data differs from the undisturbed run"


def test_a_run_that_fails_by_itself_shows_its_own_error_and_nothing_is_left(tmp_path: Path) -> None:
    command, environment = prepared(tmp_path, "workers=0", planted=FAILS)
    finished = run(command, tmp_path, environment)
    assert finished.code == 3
    assert "the undisturbed run ended with exit code 3" in finished.err
    assert "ValueError: planted" in finished.err
    assert not list(temporary(tmp_path).glob("lockstep-*"))
    assert not list((tmp_path / "memory").iterdir())


def test_configs_and_options_that_cannot_work_are_refused(tmp_path: Path) -> None:
    _, environment = prepared(tmp_path)
    finished = call(["chaos", "planted.yaml", "batch.per_device=8"], tmp_path, environment)
    assert (finished.code, finished.out) == (2, "")
    assert "batch.per_device=8: the batch would depend on" in finished.err
    finished = call(["chaos", "planted.yaml", "--keep", "."], tmp_path, environment)
    assert (finished.code, finished.out) == (2, "")
    assert "expected a folder that is new or empty" in finished.err
    finished = call(["chaos", "planted.yaml", "--keep", "planted.py/kept"], tmp_path, environment)
    assert (finished.code, finished.out) == (2, "")
    assert "--keep planted.py/kept cannot be created: Not a directory" in finished.err
    finished = call(["chaos", "planted.yaml", "-n", "5"], tmp_path, environment)
    assert (finished.code, finished.out) == (2, "")
    assert "5 processes cannot share lanes=4" in finished.err


def test_a_stop_ends_all_processes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    command, environment = prepared(tmp_path, "epochs=2", "workers=0", "--kills", "50")
    with started(command, tmp_path, environment) as process:
        begun = "lockstep-chaos-*/round-1/events.jsonl"
        wait_for(lambda: any(temporary(tmp_path).glob(begun)), 90, "the first round has begun")
        children = descendants(process.pid)
        assert children
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert not [child for child in children if is_running(child.pid)]
    assert not list(temporary(tmp_path).glob("lockstep-*"))
    assert not list((tmp_path / "memory").iterdir())


# A fork server imports what ranks were seen to need, and has no RANK.
SLOW_TO_IMPORT = """
import os, pathlib, time
if "RANK" not in os.environ:
    pathlib.Path("importing").touch()
    time.sleep(60)
"""
SLEEPER = """
import os, pathlib, time
pathlib.Path("rank-0.pid").write_text(str(os.getpid()))
time.sleep(120)
"""
LAUNCHER = """
import time
from lockstep.launcher.rank_processes import RankProcesses

processes = RankProcesses(["sleeper.py"], is_warm=True)
processes.start([{"RANK": "0", "WORLD_SIZE": "1"}])
processes.import_ahead("slow_to_import")
time.sleep(120)
"""


def test_ranks_end_with_their_launcher_although_the_fork_server_is_importing(tmp_path: Path) -> None:
    for name, text in (("slow_to_import", SLOW_TO_IMPORT), ("sleeper", SLEEPER), ("launcher", LAUNCHER)):
        (tmp_path / f"{name}.py").write_text(text)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with started([sys.executable, "launcher.py"], tmp_path, {"PYTHONPATH": paths}) as launcher:
        wait_for(lambda: (tmp_path / "importing").exists() and (tmp_path / "rank-0.pid").exists(), 60, "it imports")
        pid = int((tmp_path / "rank-0.pid").read_text())
        assert is_running(pid)
        launcher.kill()
        wait_for(lambda: not is_running(pid), 10, "the rank has ended")
