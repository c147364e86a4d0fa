"""Whatever the files of a run folder hold, every command that reads it, and a resume, ends with a result or a line."""

import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep.errors import LockstepError, Stopped
from lockstep.terminal_text import escape_controls
from lockstep.train.run import Run
from lockstep.world.world import World
from tests.classification import DATA, loss
from tests.commands import call
from tests.mutations import mutate
from tests.run_folders import finished_run, search_run

COMMANDS = [
    ["report", "RUN"],
    ["report", "--json", "RUN", "TWIN"],
    ["watch", "--once", "RUN"],
    ["plan", "RUN"],
    ["ckpt", "ls", "RUN"],
    ["ckpt", "verify", "RUN"],
    ["ckpt", "audit", "RUN"],
    ["ckpt", "digest", "RUN"],
    ["ckpt", "diff", "RUN", "TWIN"],
]
ENDS = (0, 2, 3, 4)  # a traceback has exit code 3 too, and is recognized by its text


def train(folder: Path, stop_after: int | None = None) -> None:
    """Train a little, with everything that a run folder can hold; resume what is there."""
    run = Run(folder, World(), seed=3, trace=True, sinks=[])
    run.stop_after = stop_after
    try:
        model = run.prepare(nn.Linear(4, 3))
        average = run.ema(model, decay=0.9)
        optimizer = run.optimizer(model, lambda params: torch.optim.Adam(params, lr=0.1))
        for step in run.steps(run.loader(DATA, 16), epochs=2):
            step.accumulate(loss, model)
            step.update(optimizer)
            average.update()
            run.log(loss=step.loss, nested={"a": [1, "b"]})
            run.log_text("words", "some words\nand more")
            if step.every(2):
                run.save(is_best=True, metadata={"metrics": {"accuracy": 0.5}})
    finally:
        run.close()


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two equal runs that were stopped before their end, a search, a run with timings, and a file outside of them."""
    folder = tmp_path_factory.mktemp("kept")
    with pytest.raises(Stopped):
        train(folder / "run", stop_after=6)
    (folder / "run" / "incidents").mkdir()
    report = '{"kind": "crash", "t": 1000.0, "text": "rank 1 failed", "ranks": {"1": {"step": 4, "phase": "step"}}}'
    (folder / "run" / "incidents" / "20300101-000000-crash.json").write_text(report)
    (folder / "run" / "history.json").write_text('[{"step": 4, "metrics": {"accuracy": 0.5}}]')
    search_run(folder / "search")
    run_info = json.loads((finished_run(folder / "timed") / "run.json").read_text())
    run_info["fingerprint"]["lanes"] = 4  # `lockstep plan` needs them
    (folder / "timed" / "run.json").write_text(json.dumps(run_info))
    shutil.copytree(folder / "run", folder / "twin")
    (folder / "outside").write_text("untouched")
    return folder


class Fuzz:
    """Copies of the kept runs, one of which is changed in every try."""

    def __init__(self, kept: Path, folder: Path) -> None:
        self.kept, self.folder = kept, folder
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        self.outcomes: Counter[str] = Counter()

    def make(self, number: int, seed: int) -> None:
        rng = random.Random(f"{seed}/{number}")
        (name,) = rng.choices(["run", "search", "timed"], [6, 1, 1])
        run = self.folder / name
        what = f"try {number} of seed {seed}: {mutate(run, rng)}"
        try:
            for command in rng.sample(COMMANDS, 2):
                self._call(command, run, what)
            if name == "run" and rng.random() < 0.4:
                self._resume(run, what)
            self._check_outside(name, what)
        finally:
            shutil.rmtree(run)
            shutil.copytree(self.kept / name, run)

    def _call(self, command: list[str], run: Path, what: str) -> None:
        places = {"RUN": str(run), "TWIN": str(self.folder / "twin")}
        arguments = [places.get(each, each) for each in command]
        finished = call(arguments, self.folder)
        shown = f"{what}\n{command}: {finished.code}\n{finished.out[-2000:]}\n{finished.err[-4000:]}"
        assert "Traceback" not in finished.err, shown
        assert finished.code in ENDS, shown
        assert all(line.startswith("lockstep: ") for line in finished.err.splitlines()), shown
        assert len(finished.err) < 3000, shown
        text = finished.out + finished.err
        assert text == escape_controls(text), shown
        self.outcomes[f"{command[0]} {finished.code}"] += 1

    def _resume(self, run: Path, what: str) -> None:
        print(what)  # if it fails or hangs, pytest shows it
        before = (run / "checkpoints").exists()
        outcome = "resumed" if before else "new"
        try:
            train(run)
        except LockstepError as error:
            assert str(error), what
            assert len(str(error)) < 5000, what
            outcome = type(error).__name__
        except Exception as error:
            raise AssertionError(what) from error
        self.outcomes[outcome] += 1

    def _check_outside(self, name: str, what: str) -> None:
        assert sorted(each.name for each in self.folder.iterdir()) == ["outside", "run", "search", "timed", "twin"], (
            what
        )
        assert (self.folder / "outside").read_text() == "untouched", what
        assert _read(self.folder / "twin") == _read(self.kept / "twin"), what


def _read(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def fuzz(kept: Path, folder: Path, tries: range, seed: int) -> None:
    bench = Fuzz(kept, folder)
    for number in tries:
        bench.make(number, seed)
    print(f"{len(tries)} changed folders: {dict(sorted(bench.outcomes.items()))}")
    assert bench.outcomes["resumed"] > 0


def test_changed_run_folders_are_read_or_refused_in_one_line(kept: Path, tmp_path: Path) -> None:
    fuzz(kept, tmp_path, range(60), seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_changed_run_folders_are_read_or_refused_in_one_line(kept: Path, tmp_path: Path) -> None:
    fuzz(kept, tmp_path, range(1000), seed=2)
