"""A full, missing or closed standard output does not end a training, and closing the terminal is a request to stop."""

import json
import os
import pty
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.commands import LOCKSTEP, run, started, wait_for

# Writes to the terminal or device that its first argument names, as if it had been started there.
TRAINER = """
import os, sys, time
output = os.open(sys.argv[1], os.O_WRONLY | os.O_NOCTTY)
for number in 1, 2:
    os.dup2(output, number)

import torch
import torch.nn.functional as F
import lockstep

def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)

def main(world):
    run = lockstep.Run("runs/mine", world, seed=3)
    model = run.prepare(torch.nn.Linear(4, 2))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.arange(64) % 2)
    for step in run.steps(run.loader(data, 16, lanes=4), steps=int(sys.argv[2]), save_every=1000):
        step.accumulate(loss, model)
        step.update(optimizer)
        print("step", step.number, flush=True)
        run.log(loss=step.loss)
        time.sleep(float(sys.argv[3]))

if __name__ == "__main__":
    lockstep.launch(main, device="cpu")
"""
WAYS = {"alone": [sys.executable, "train.py"], "two processes": [*LOCKSTEP, "run", "-n", "2", "train.py"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAINER)
    return tmp_path


def events(folder: Path) -> list[dict[str, object]]:
    """The events so far; a torn last line is left out."""
    found = []
    with suppress(FileNotFoundError, ValueError):
        for line in (folder / "runs/mine/events.jsonl").read_text().splitlines():
            found.append(json.loads(line))
    return found


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_run_on_a_full_disk_s_log_goes_on(folder: Path, way: list[str]) -> None:
    finished = run([*way, "/dev/full", "6", "0"], folder)
    assert finished.code == 0, finished.err
    assert events(folder)[-1]["kind"] == "end"


def test_a_command_without_standard_streams_trains(folder: Path) -> None:
    """Nor does a file of the run get the number of one, and with it what libraries print there."""
    command = f"exec {sys.executable} -m lockstep run -n 2 train.py /dev/null 6 0 <&- >&- 2>&-"
    finished = run(["sh", "-c", command], folder)
    assert finished.code == 0
    assert events(folder)[-1]["kind"] == "end"


@pytest.fixture
def terminal() -> Iterator[tuple[int, str]]:
    """A terminal: its end that a window would hold, and its path."""
    window, end = pty.openpty()
    path = os.ttyname(end)
    os.close(end)
    yield window, path
    with suppress(OSError):
        os.close(window)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_closing_the_terminal_saves_the_run(folder: Path, terminal: tuple[int, str], way: list[str]) -> None:
    window, path = terminal
    memory = folder / "memory"
    memory.mkdir()
    command = [*way, path, "100000", "0.01"]
    with started(command, folder, {"LOCKSTEP_MEMORY": str(memory)}) as process:
        wait_for(lambda: len(events(folder)) > 5, 60, "a few steps")
        os.close(window)
        process.send_signal(signal.SIGHUP)  # as the shell does
        process.communicate(timeout=30)
        assert process.returncode == 75
    (saved,) = (folder / "runs/mine/checkpoints").glob("step-*")
    last = max(event["step"] for event in events(folder) if event["kind"] == "step")  # type: ignore[type-var]
    assert saved.name == f"step-{last}"
    assert list(memory.iterdir()) == []
