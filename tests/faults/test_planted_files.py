"""Links and pipes that somebody put into a run folder: nothing outside is changed, nothing waits, no traceback."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep.errors import LockstepError
from lockstep.train.run import Run
from lockstep.world.world import World
from tests.classification import DATA, loss
from tests.commands import call
from tests.sinks import RecordingSink

_LIMIT_S = 30  # nothing here takes a tenth of it; without it a pipe would block the whole session

FILES = [
    "run.json",
    "config.yaml",
    ".lock",
    "events.jsonl",
    "digests.jsonl",
    "ledger.jsonl",
    "history.json",
    "ranks/0.jsonl",
    "checkpoints/LATEST",
    "checkpoints/step-4/manifest.json",
    "checkpoints/step-4/model.safetensors",
]
COMMANDS = [["ckpt", "ls"], ["ckpt", "verify"], ["ckpt", "audit"], ["ckpt", "digest"], ["report"], ["watch", "--once"]]


@pytest.fixture(autouse=True)
def nothing_waits() -> Iterator[None]:
    def fail(*_: object) -> None:
        raise AssertionError("it waits at a pipe")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(_LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps."""
    folder = tmp_path_factory.mktemp("finished") / "a"
    train(folder, epochs=1)
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "a"))


def train(folder: Path, epochs: int) -> None:
    run = Run(folder, World(), trace=True, sinks=[RecordingSink()])
    model = run.prepare(nn.Linear(4, 3))
    optimizer = run.optimizer(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    try:
        for step in run.steps(run.loader(DATA, 16), epochs=epochs):
            step.accumulate(loss, model)
            step.update(optimizer)
    except BaseException:
        run.close(abandon=True)
        raise


def resume(folder: Path) -> str:
    """Continue the run; return what it was refused with, or nothing."""
    try:
        train(folder, epochs=2)
    except LockstepError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", FILES)
def test_a_run_writes_nothing_through_a_link(folder: Path, tmp_path: Path, name: str) -> None:
    path, precious = folder / name, tmp_path / "precious"
    if path.exists():
        path.replace(precious)
    else:
        precious.write_bytes(b"{}")
    before = precious.read_bytes()
    path.symlink_to(precious)
    problem = resume(folder)
    assert "\n" not in problem
    assert precious.read_bytes() == before
    if name in ("run.json", ".lock", "events.jsonl", "digests.jsonl", "ledger.jsonl", "ranks/0.jsonl"):
        assert "a symbolic link, which is not followed here" in problem


@pytest.mark.parametrize("name", FILES)
def test_a_run_does_not_wait_at_a_pipe(folder: Path, name: str) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    problem = resume(folder)
    assert "\n" not in problem
    if name in ("run.json", ".lock", "events.jsonl", "digests.jsonl", "ledger.jsonl", "ranks/0.jsonl"):
        assert name in problem and "not a regular file" in problem


@pytest.mark.parametrize("name", FILES)
def test_commands_do_not_wait_at_a_pipe(folder: Path, name: str) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    for command in COMMANDS:
        done = call([*command, str(folder)], folder.parent)
        assert done.code in (0, 2, 3), done
        assert "Traceback" not in done.err


def test_a_report_replaces_a_link_and_does_not_follow_it(folder: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep")
    (folder / "report.html").symlink_to(precious)
    assert call(["report", str(folder)], tmp_path).code == 0
    assert precious.read_text() == "keep"
    assert not (folder / "report.html").is_symlink()


@pytest.mark.parametrize("name", ["mine.yaml", "base.yaml"])
def test_a_config_that_is_a_pipe_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine.yaml").write_text("base: base.yaml\n")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    for command in (["train"], ["train", "-n", "2"], ["verify"], ["plan"]):
        done = call([*command, "mine.yaml"], tmp_path)
        (line,) = done.err.splitlines()
        assert (done.code, line.endswith(f"{name}: cannot be read: not a regular file")) == (2, True), done
