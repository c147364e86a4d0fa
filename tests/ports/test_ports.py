"""Every script in `scripts/`: one digest on any number of processes, after a kill, and resumed elsewhere."""

import json
import os
import runpy
import shutil
import signal
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from lockstep.errors import Stopped
from lockstep.testing import RanksFailed, ranks
from lockstep.train.step import Step
from lockstep.world.world import World
from tests.commands import LOCKSTEP, run, wait_for
from tests.unit.data.datasets import starting_by

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))
AT_STEP = 5  # the newest checkpoint is an earlier step's
COMMITTED = "runs/*/checkpoints/step-*/manifest.json"

each_port = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)


def digest_in(folder: Path, script: Path) -> str:
    return str(events_in(folder, script)[-1]["digest"])


def events_in(folder: Path, script: Path) -> list[dict[str, object]]:
    lines = (folder / "runs" / script.stem / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def train(world: World, script: Path, signal_at_step: tuple[int, int] | None = None) -> None:
    """Run a script's `main` as `lockstep run` would; the last rank sends itself a signal in a step, if it is given."""
    torch.manual_seed(world.rank)  # nothing may depend on it
    update = Step.update

    def interrupted(step: Step, *optimizers: torch.optim.Optimizer) -> None:
        if signal_at_step is not None and step.number == signal_at_step[0] and world.rank == world.size - 1:
            wait_for(lambda: any(Path().glob(COMMITTED)), 30, "a checkpoint")  # they are saved in the background
            os.kill(os.getpid(), signal_at_step[1])
        update(step, *optimizers)

    with patch.object(Step, "update", interrupted), starting_by("fork"):
        try:
            runpy.run_path(str(script))["main"](world)
        except Stopped:
            assert signal_at_step is not None


@each_port
def test_one_and_two_processes_give_one_digest(script: Path, tmp_path: Path) -> None:
    digests = set()
    for size in (1, 2):
        folder = tmp_path / str(size)
        folder.mkdir()
        finished = run([*LOCKSTEP, "run", "-n", str(size), str(script)], folder)
        assert finished.code == 0, finished.err
        assert "Warning" not in finished.err
        digests.add(digest_in(folder, script))
    assert len(digests) == 1


@pytest.mark.slow
@each_port
def test_three_processes_kills_and_moves_change_no_bit(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_folder(name: str) -> Path:
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / name)
        return tmp_path / name

    whole = in_folder("whole")
    ranks(1).run(train, script)
    digest = digest_in(whole, script)

    three = in_folder("three")
    ranks(3).run(train, script)
    assert digest_in(three, script) == digest

    killed = in_folder("killed")
    with pytest.raises(RanksFailed, match="SIGKILL"):
        ranks(2).run(train, script, (AT_STEP, signal.SIGKILL))
    ranks(2).run(train, script)
    assert_resumed(killed, script, digest)

    stopped = in_folder("stopped")
    ranks(2).run(train, script, (AT_STEP, signal.SIGTERM))
    shutil.copytree(stopped, tmp_path / "moved")
    for name, size in (("stopped", 1), ("moved", 3)):
        folder = in_folder(name)
        ranks(size).run(train, script)
        assert_resumed(folder, script, digest)


def assert_resumed(folder: Path, script: Path, digest: str) -> None:
    starts = [event for event in events_in(folder, script) if event["kind"] == "start"]
    assert [event["resumed"] is not None for event in starts] == [False, True]
    assert digest_in(folder, script) == digest
