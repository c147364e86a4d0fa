"""`lockstep batch`: each size is tried in a new process, and whatever happens to it is a result."""

import json
from pathlib import Path

import pytest

from tests.commands import LOCKSTEP, call, run

RECIPE = """
import os, signal
import torch
from torch import nn
import lockstep
from lockstep.train.recipe import Splits

class Tiny:
    config_class = lockstep.Config

    def model(self, config):
        self.fails_at = config.data.fails_at
        self.kills_at = config.data.kills_at
        if config.data.refuses:
            raise lockstep.errors.UserError("refuses: set it to false")
        return nn.Linear(4, 1)

    def data(self, config):
        samples = torch.utils.data.TensorDataset(torch.randn(1000, 4))
        return Splits(samples, samples)

    def loss(self, model, batch):
        (inputs,) = batch
        if len(inputs) >= self.kills_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if len(inputs) >= self.fails_at:
            raise ValueError("planted")
        wide = model(inputs).expand(-1, 9_000_000) * 2  # 36 MB for each sample
        return wide.sum(1).sum(), len(inputs)

    metrics = None

recipe = Tiny()
"""

CONFIG = """
recipe: tiny:recipe
epochs: 1
batch: {global: 4}
lanes: 2
optim: {lr: 1e-3}
average: {decay: 0.9}
data: {fails_at: 1000, kills_at: 1000, refuses: false}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny.py").write_text(RECIPE)
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    return tmp_path


def test_a_process_that_is_killed_does_not_end_the_search(folder: Path) -> None:
    finished = run([*LOCKSTEP, "batch", "tiny.yaml", "data.kills_at=4", "--json"], folder, timeout_s=240)
    assert finished.code == 0, finished.err
    found = json.loads(finished.out)
    assert [(each["size"], each["fits"]) for each in found["tries"]] == [(2, True), (4, False), (3, True)]
    assert found["tries"][1]["why"] == "ended by SIGKILL"
    assert found["largest"] == 3
    assert found["settings"]["lanes"] == 2
    assert found["tries"][0]["peak_bytes"] > 70_000_000
    assert found["room_bytes"] > 0
    assert {path.name for path in folder.iterdir()} <= {"tiny.py", "tiny.yaml", "__pycache__"}


def test_progress_and_advice_are_printed(folder: Path) -> None:
    """There is memory for eleven samples per lane."""
    sizes = ["batch.global=16", "--memory-gb", "0.4", "--tries", "3"]
    finished = run([*LOCKSTEP, "batch", "tiny.yaml", *sizes], folder, timeout_s=240)
    assert finished.code == 0, finished.err
    lines = finished.out.splitlines()
    assert lines[0] == "on cpu, 0.40 GB for each process; a batch is 2 lanes"
    assert [line.split()[:2] for line in lines[2:5]] == [["8", "16"], ["16", "32"], ["12", "24"]]
    assert ["does not fit: out of memory" in line for line in lines[2:5]] == [False, True, True]
    assert lines[5:] == [
        "largest that fits: 8 samples a lane (12 do not)",
        "fastest: 8 samples a lane, as in the config",
        "the search reached its limit of tries (--tries)",
        "advice: keep the batch: batch.global=16 lanes=2",
    ]


def test_errors_in_a_recipe_and_in_the_options_are_reported(folder: Path) -> None:
    finished = call(["batch", "tiny.yaml", "data.fails_at=1"], folder)
    assert finished.code == 3
    assert 'raise ValueError("planted")' in finished.err
    finished = call(["batch", "tiny.yaml", "data.refuses=true"], folder)
    assert finished.code == 2
    assert finished.err == "lockstep: refuses: set it to false\n"
    finished = call(["batch", "tiny.yaml", "-n", "2", "parallel=single"], folder)
    assert finished.code == 2
    assert "parallel=single is for one process, but 2 were started" in finished.err
    finished = call(["batch", "tiny.yaml", "lr=1"], folder)
    assert finished.code == 2
    assert "lr: unknown key" in finished.err
    finished = call(["batch", "tiny.yaml"], folder, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    assert finished.code == 2
    assert "without a launcher" in finished.err


def test_nothing_fits(folder: Path) -> None:
    finished = call(["batch", "tiny.yaml", "batch.global=2", "--memory-gb", "0.000001"], folder)
    assert finished.code == 3
    assert "nothing fits, not even 1 sample a lane" in finished.out
    finished = call(["batch", "tiny.yaml", "--limit-s", "1"], folder)
    assert finished.code == 3
    assert finished.out == "no trial finished in time: a larger --limit-s may help\n"
    finished = call(["batch", "--help"], folder)
    assert "3 if nothing does, or the search ended too early to tell" in " ".join(finished.out.split())
