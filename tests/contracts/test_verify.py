"""`lockstep verify` through the real command: a recipe that keeps the promise, and some that do not."""

import json
import signal
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tests.commands import LOCKSTEP, call, descendants, run, started, wait_for
from tests.planted import COUNTER, FAILS, UNSEEDED_DATA, plant, temporary

TIMEOUT_S = 400  # four whole runs, on a machine that may be busy
pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)

CONFIG = """
recipe: planted:recipe
epochs: 1
batch: {global: 64}
lanes: 4
tail: short
average: {decay: 0.9}
log: {tensorboard: true}  # not needed here
"""

FORWARD_BY_RANK = """
class ByRank(Classifier):
    def forward(self, inputs):
        return super().forward(inputs) * (1 + lockstep.get_rank())

class Planted(Recipe):
    def model(self, config):
        return ByRank()

recipe = Planted()
"""
UPDATE_BY_RANK = """
from torch.optim.optimizer import register_optimizer_step_post_hook

def perturb(optimizer, args, kwargs):
    optimizer.param_groups[0]["params"][0].data += lockstep.get_rank() * 1e-3

register_optimizer_step_post_hook(perturb)
recipe = Recipe()
"""


class Verification(NamedTuple):
    code: int
    out: str
    err: str
    left: list[Path]  # in the folder for temporary files


def verify(folder: Path, planted: str, *options: str) -> Verification:
    command, environment = prepared(folder, planted, *options)
    finished = run(command, folder, environment, timeout_s=TIMEOUT_S)
    return Verification(*finished, left=left_behind(folder))


def prepared(folder: Path, planted: str, *options: str) -> tuple[list[str], dict[str, str]]:
    return [*LOCKSTEP, "verify", "planted.yaml", *options], plant(folder, CONFIG, planted)


def left_behind(folder: Path) -> list[Path]:
    assert not (folder / "runs").exists()
    return list(temporary(folder).glob("lockstep-*"))


@pytest.mark.slow
def test_a_recipe_that_keeps_the_promise(tmp_path: Path) -> None:
    found = verify(tmp_path, "", "--steps", "5", "--keep", "kept", "optim.lr=1e-2", "epochs=3")
    assert found.code == 0, found.out + found.err
    assert not found.left
    lines = found.out.splitlines()
    trials, end, checklist, where = lines[:4], lines[4], lines[5:-1], lines[-1]
    assert [line.split("  ")[0] for line in trials] == [
        "one process",
        "2 processes",
        "2 processes, stopped after step 2, resumed on one",
        "one process, stopped after step 2, resumed on 2",
    ]
    assert [line.split("  ")[-1].strip() for line in trials[1:]] == ["the same"] * 3
    assert [line[:3] for line in checklist] == ["[x]"] * 8, checklist
    assert "loads for inference in one: loss " in checklist[4]
    assert checklist[4].endswith(", as recorded by the run itself")
    digest = trials[0].split()[-1]
    assert end == f"all 4 agree, bit for bit: digest {digest}"
    assert where == "the runs are in kept"
    runs = ["one", "many", "many-then-one", "one-then-many"]
    traces = {(tmp_path / "kept" / name / "digests.jsonl").read_text() for name in runs}
    assert len(traces) == 1
    assert len(traces.pop().splitlines()) == 5
    assert "lr: 0.01" in (tmp_path / "kept" / "one" / "config.yaml").read_text()
    assert not (tmp_path / "kept" / "one" / "tensorboard").exists()


@pytest.mark.slow
def test_a_built_in_recipe(tmp_path: Path) -> None:
    temporary(tmp_path).mkdir()
    command = [*LOCKSTEP, "verify", "digits", "quick=true", "model.width=4", "--steps", "4", "--json"]
    finished = run(command, tmp_path, {"TMPDIR": str(temporary(tmp_path))}, timeout_s=TIMEOUT_S)
    assert finished.code == 0, finished.out + finished.err
    report: dict[str, Any] = json.loads(finished.out)
    assert report["equal"]
    assert [check["holds"] for check in report["checklist"]] == [True] * 8, report["checklist"]
    assert len({trial["digest"] for trial in report["trials"]}) == 1
    assert report["folder"] is None
    assert not left_behind(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "phase", "step", "cause"),
    [
        (UNSEEDED_DATA, "data", 1, "function of (seed, epoch, sample)"),
        (FORWARD_BY_RANK, "loss", 1, "depends on the rank"),
        (UPDATE_BY_RANK, "state", 1, "optimizer"),
        (COUNTER, "loss", 3, "not in the checkpoint"),
    ],
    ids=["data", "forward", "update", "resume"],
)
def test_a_planted_fault_is_found_and_its_phase_named(
    tmp_path: Path, planted: str, phase: str, step: int, cause: str
) -> None:
    found = verify(tmp_path, planted, "--steps", "4")
    assert found.code == (3 if planted == UPDATE_BY_RANK else 6), found.out + found.err
    difference = next(line for line in found.out.splitlines() if line.startswith("different: "))
    by = "2 processes, stopped after step 2, resumed on one" if step == 3 else "2 processes"
    assert difference.startswith(f"different: {by}: first at step {step}, in its {phase}: ")
    assert cause in found.out
    assert ("Two runs on one process differ as well" in found.out) == (phase == "data")
    (folder,) = found.left
    assert f"the runs are in {folder}" in found.out
    assert (folder / "many" / "digests.jsonl").exists()
    if planted == UPDATE_BY_RANK:
        assert "after step 4 the ranks differ in " in found.err, "the error of the run itself"


def test_a_run_that_fails_shows_its_own_error_and_nothing_is_left(tmp_path: Path) -> None:
    found = verify(tmp_path, FAILS)
    assert found.code == 3
    first, *checklist = found.out.splitlines()
    assert first.split() == ["one", "process", "failed", "with", "exit", "code", "3"]
    assert checklist == [
        "failed: one process ended with exit code 3 before the end of its first step, so there is no result to "
        "compare; the run's own output is on standard error",
        "[!] one process trains: exit code 3",
        "[ ] 2 processes train: not checked: a run before it failed",
    ]
    assert "ValueError: planted" in found.err
    assert not found.left


def test_what_cannot_be_verified_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "a-file").touch()
    for options, complaint in (
        (["batch.per_device=8"], "batch.per_device=8: the batch would depend on"),
        (["--keep", str(tmp_path)], "expected a folder that is new or empty"),
        (["optim.lrr=1"], "optim.lrr: unknown key"),
        (["--steps", "1"], "greater than or equal to 2"),
        (["--one-args", "--batch-size 8"], "--one-args '--batch-size 8' is for scripts"),
    ):
        refused = call(["verify", "digits", *options], tmp_path)
        assert (refused.code, refused.out) == (2, "")
        assert complaint in refused.err


@pytest.mark.slow
def test_a_run_that_is_too_short_to_be_stopped_is_refused(tmp_path: Path) -> None:
    found = verify(tmp_path, "", "--steps", "20", "quick=true")
    assert (found.code, found.left) == (2, [])
    assert "ended before step 10, where it was to be stopped" in found.err


@pytest.mark.slow
def test_a_stop_ends_all_processes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    command, environment = prepared(tmp_path, "Recipe.pause_s = 0.1", "--steps", "100000")
    with started(command, tmp_path, environment) as process:

        def is_training() -> bool:
            return any((folder / "one" / "events.jsonl").exists() for folder in left_behind(tmp_path))

        wait_for(is_training, 60, "the first run has begun")
        children = descendants(process.pid)
        assert children
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped on request (SIGTERM)" in err
    assert not left_behind(tmp_path)
    assert not [child for child in children if psutil.pid_exists(child.pid)]
