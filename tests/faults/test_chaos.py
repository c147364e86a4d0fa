"""`lockstep chaos` through the real command: a job that is killed again and again, and jobs that do lose something."""

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.observe.chaos.plan import draw_plan
from tests.commands import LOCKSTEP, descendants, is_running, run, started, wait_for
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

# Else a step is over before anybody could be killed in it.
SLOW_STEPS = "Recipe.pause_s = 0.005\n"


def prepared(folder: Path, *options: str, planted: str = "") -> tuple[list[str], dict[str, str]]:
    environment = plant(folder, CONFIG, SLOW_STEPS + planted) | {"LOCKSTEP_MEMORY": str(folder / "memory")}
    (folder / "memory").mkdir()
    return [*LOCKSTEP, "chaos", "planted.yaml", *options], environment


def read_all(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def endure(folder: Path, kills: int, seed: int, *options: str, timeout_s: float) -> dict[str, Any]:
    """Nothing is lost; what the command says."""
    arguments = ["--kills", str(kills), "--seed", str(seed), "--keep", "kept", "--json", *options]
    command, environment = prepared(folder, *arguments)
    finished = run(command, folder, environment, timeout_s=timeout_s)
    assert finished.code == 0, finished.out + finished.err
    told: dict[str, Any] = json.loads(finished.out)
    assert told["ok"]
    assert told["kills"] == kills
    assert told["gave_up"] == 0
    assert not any(check["faults"] for check in told["checks"])
    assert len(told["checks"]) == 8
    attacks = read_all(folder / "kept" / "attacks.jsonl")
    assert [attack["number"] for attack in attacks if attack["is_hit"]] == list(range(1, len(told_plan(folder)) + 1))
    assert len({attack["pid"] for attack in attacks if attack["act"] == "kill"}) > 1
    assert not list((folder / "memory").iterdir())
    return told


def told_plan(folder: Path) -> list[dict[str, Any]]:
    return read_all(folder / "kept" / "plan.jsonl")


def reached(folder: Path, name: str) -> set[Any]:
    return {attack[name] for attack in read_all(folder / "kept" / "attacks.jsonl")}


@pytest.mark.timeout(420)
def test_twenty_kills_and_nothing_is_lost(tmp_path: Path) -> None:
    told = endure(tmp_path, 20, 33, timeout_s=400)
    assert {"rank 0", "launcher", "nursery", "data worker", "everything"} <= told["victims"].keys()
    assert reached(tmp_path, "processes") == {1, 2}, "it was resized"
    assert {"start", "step", "save", "evaluation"} <= reached(tmp_path, "moment")
    end = json.loads((tmp_path / "kept" / "reference" / "events.jsonl").read_text().splitlines()[-1])
    plan = draw_plan(33, 20, processes=2, steps=end["step"], with_data_workers=True)
    assert [attack.as_json() for attack in plan] == told_plan(tmp_path), "the seed says it all"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_hundred_kills_and_nothing_is_lost(tmp_path: Path) -> None:
    told = endure(tmp_path, 100, 2, "-n", "3", "epochs=20", timeout_s=1400)
    assert reached(tmp_path, "processes") == {1, 2, 3}
    assert {"starting", "saving", "computing", "evaluating"} <= told["phases"].keys()


def lose(folder: Path, planted: str) -> tuple[str, Path]:
    """Something is lost; what is said, and where the runs were kept."""
    # The seed of one rank killed in a step, when there is a checkpoint.
    arguments = ["epochs=3", "workers=0", "--kills", "1", "--seed", "170"]
    command, environment = prepared(folder, *arguments, planted=planted)
    finished = run(command, folder, environment, timeout_s=160)
    assert finished.code == 3, finished.out + finished.err
    assert "something was lost" in finished.out
    (kept,) = temporary(folder).glob("lockstep-chaos-*")
    assert f"are in {kept}" in finished.out
    assert not list((folder / "memory").iterdir())
    return finished.out, kept


def faults_of(out: str, check: str) -> Sequence[str]:
    lines = out.splitlines()
    at = next(number for number, line in enumerate(lines) if check in line)
    assert lines[at].startswith("FAULT ")
    return [line.strip() for line in lines[at + 1 :] if line.startswith("      ")]


def test_a_counter_that_no_checkpoint_holds_is_found(tmp_path: Path) -> None:
    out, kept = lose(tmp_path, COUNTER)
    faults = faults_of(out, "every step of every attempt had the same samples")
    assert "other loss than in the run left alone" in faults[0]
    assert "expected {" in faults_of(out, "the digest of one that was left alone")[0]
    assert (kept / "attacks.jsonl").exists()


@pytest.mark.slow
def test_samples_that_are_not_keyed_are_found(tmp_path: Path) -> None:
    out, _ = lose(tmp_path, UNSEEDED_DATA)
    faults = faults_of(out, "every step of every attempt had the same samples")
    assert faults[0] == "round 1: step 1: other data than in the run left alone"


def test_a_run_that_fails_by_itself_shows_its_own_error_and_nothing_is_left(tmp_path: Path) -> None:
    command, environment = prepared(tmp_path, planted=FAILS)
    finished = run(command, tmp_path, environment)
    assert finished.code == 3
    assert "the run that was left alone ended with exit code 3" in finished.err
    assert "ValueError: planted" in finished.err
    assert not list(temporary(tmp_path).glob("lockstep-*"))
    assert not list((tmp_path / "memory").iterdir())


def test_what_was_never_promised_is_refused(tmp_path: Path) -> None:
    command, environment = prepared(tmp_path, "batch.per_device=8")
    finished = run(command, tmp_path, environment)
    assert (finished.code, finished.out) == (2, "")
    assert "batch.per_device=8 means another batch" in finished.err
    finished = run([*LOCKSTEP, "chaos", "planted.yaml", "--keep", "."], tmp_path, environment)
    assert (finished.code, finished.out) == (2, "")
    assert "expected a folder that is new or empty" in finished.err
    finished = run([*LOCKSTEP, "chaos", "planted.yaml", "--keep", "planted.py/kept"], tmp_path, environment)
    assert (finished.code, finished.out) == (2, "")
    assert "--keep planted.py/kept cannot be made: Not a directory" in finished.err
    finished = run([*LOCKSTEP, "chaos", "planted.yaml", "-n", "5"], tmp_path, environment)
    assert (finished.code, finished.out) == (2, "")
    assert "5 processes cannot share lanes=4" in finished.err


def test_stopped_in_the_middle_it_takes_everything_with_it(tmp_path: Path) -> None:
    command, environment = prepared(tmp_path, "--kills", "50")
    with started(command, tmp_path, environment) as process:
        begun = "lockstep-chaos-*/round-1/events.jsonl"
        wait_for(lambda: any(temporary(tmp_path).glob(begun)), 90, "the first round has begun")
        children = descendants(process.pid)
        assert children
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert not [child for child in children if is_running(child.pid)]
    assert not list(temporary(tmp_path).glob("lockstep-*"))
    assert not list((tmp_path / "memory").iterdir())


# A nursery imports what ranks were seen to need, and has no rank.
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
from lockstep.launcher.processes import Processes

processes = Processes(["sleeper.py"], is_warm=True)
processes.start([{"RANK": "0", "WORLD_SIZE": "1"}])
processes.import_ahead("slow_to_import")
time.sleep(120)
"""


def test_ranks_end_with_their_launcher_although_the_nursery_is_importing(tmp_path: Path) -> None:
    for name, text in (("slow_to_import", SLOW_TO_IMPORT), ("sleeper", SLEEPER), ("launcher", LAUNCHER)):
        (tmp_path / f"{name}.py").write_text(text)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with started([sys.executable, "launcher.py"], tmp_path, {"PYTHONPATH": paths}) as launcher:
        wait_for(lambda: (tmp_path / "importing").exists() and (tmp_path / "rank-0.pid").exists(), 60, "it imports")
        pid = int((tmp_path / "rank-0.pid").read_text())
        assert is_running(pid)
        launcher.kill()
        wait_for(lambda: not is_running(pid), 10, "the rank has ended")
