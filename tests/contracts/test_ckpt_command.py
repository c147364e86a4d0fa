"""`lockstep ckpt` on a real run, which was stopped, killed and resumed on other numbers of processes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import typer.main
from safetensors.torch import load_file

from lockstep.checkpoint.store import load_weights
from lockstep.cli import app
from lockstep.errors import LockstepError, complain
from lockstep.events.jsonl import read_lines
from tests.checkpoints import save
from tests.commands import LOCKSTEP, Finished, run, started, wait_for
from tests.contracts.test_command_line import help_of

SETTINGS = ["epochs=4", "checkpoint.every=10", "checkpoint.keep=2", "best={metric: accuracy, mode: max}"]
SETTINGS += ["average={decay: 0.9}"]


class Made(NamedTuple):
    """22 batches an epoch, 29 samples of 1,437 left over."""

    whole: Path  # run to its end without a pause
    parts: Path  # on 2 processes, stopped after step 25; killed; then on 1 to the end


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made")
    train = [*LOCKSTEP, "train", "digits", *SETTINGS, "--quiet"]
    assert run([*train, "--run", "whole"], folder).code == 0
    assert run([*train, "-n", "2", "--stop-after", "25", "--run", "parts"], folder).code == 75
    with started([*train, "-n", "2", "--run", "parts"], folder):
        ledger = folder / "parts" / "ledger.jsonl"
        wait_for(lambda: any(line["attempt"] == 2 for line in read_lines(ledger)), 60, "a commit of the second attempt")
    finished = run([*train, "--run", "parts"], folder)
    assert finished.code == 0, finished.err
    return Made(folder / "whole", folder / "parts")


@pytest.fixture
def copied(made: Made, tmp_path: Path) -> Path:
    """One to damage."""
    return Path(shutil.copytree(made.parts, tmp_path / "copied"))


Ckpt = Callable[..., Finished]


@pytest.fixture
def ckpt(capsys: pytest.CaptureFixture[str]) -> Ckpt:
    """The command in this process: importing torch for each would take longer than all else."""

    def call(*arguments: object) -> Finished:
        capsys.readouterr()
        try:
            command = typer.main.get_command(app)
            code = command.main(["ckpt", *map(str, arguments)], "lockstep", standalone_mode=False)
        except LockstepError as error:
            code = complain(error)
        return Finished(code or 0, *capsys.readouterr())

    return call


def test_the_audit_through_the_real_command(made: Made) -> None:
    finished = run([*LOCKSTEP, "ckpt", "audit", str(made.parts)], made.parts)
    assert finished.code == 0, finished.out + finished.err
    assert finished.err == ""
    assert finished.out.startswith("4 finished epochs: each of 1,437 samples exactly once or dropped (29 per epoch); ")
    assert "3 attempts on 2, 2 and 1 processes" in finished.out
    refused = run([*LOCKSTEP, "ckpt", "audit", "checkpoints"], made.parts)
    assert refused == (2, "", "lockstep: checkpoints is not a run folder: it has neither run.json nor ledger.jsonl\n")


def test_an_altered_ledger_is_found_by_the_real_command(copied: Path) -> None:
    ledger = copied / "ledger.jsonl"
    lines = list(read_lines(ledger))
    epoch, start, stop = lines[1]["spans"][0]["consumed"][0]
    lines[1]["spans"][0]["consumed"][0] = [epoch, start + 1, stop]
    ledger.write_text("".join(json.dumps(line) + "\n" for line in lines))
    finished = run([*LOCKSTEP, "ckpt", "audit", "copied", "--json"], copied.parent)
    assert finished.code == 3
    found = json.loads(finished.out)
    assert not found["ok"]
    assert found["faults"][-1].startswith(f"epoch {epoch + 1}: 1 sample never used or dropped: ")
    assert found["turns"][0]["num_finished"] == 3


def test_altered_events_are_found(copied: Path, ckpt: Ckpt) -> None:
    events = copied / "events.jsonl"
    events.write_bytes(events.read_bytes().replace(b'"kind": "start"', b'"kind": "stare"', 1))
    finished = ckpt("audit", copied)
    assert finished.code == 3
    assert "fault: events.jsonl was altered between bytes 0 and" in finished.out


def test_ls(made: Made, ckpt: Ckpt) -> None:
    listed = json.loads(ckpt("ls", made.parts, "--json").out)
    steps = [entry["step"] for entry in listed]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] == 88
    assert [entry["is_latest"] for entry in listed] == [True] + [False] * (len(listed) - 1)
    assert sum(entry["is_best"] for entry in listed) == 1
    lines = ckpt("ls", made.parts).out.splitlines()
    assert lines[0].split() == ["step", "size", "saved", "at", "processes", "metric"]
    assert lines[1].startswith("88    ")
    assert f"accuracy {listed[0]['metrics']['accuracy']:.6g}" in lines[1]
    assert "latest" in lines[1]


def test_ls_of_a_damaged_manifest(copied: Path, ckpt: Ckpt) -> None:
    (copied / "checkpoints" / "step-88" / "manifest.json").write_text("{")
    first, second = ckpt("ls", copied).out.splitlines()[1:3]
    assert "damaged: " in first
    assert "manifest.json is damaged: it is not JSON" in first
    assert "latest" in second


def test_verify(made: Made, copied: Path, ckpt: Ckpt) -> None:
    assert ckpt("verify", made.parts).code == 0
    model = copied / "checkpoints" / "step-88" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1])
    finished = ckpt("verify", copied)
    assert finished.code == 3
    (damaged,) = [line for line in finished.out.splitlines() if line.startswith("damaged: ")]
    assert "step-88: model.safetensors has" in damaged
    assert ckpt("verify", copied, "--step", 80).code == 0
    assert ckpt("verify", model.parent).code == 3
    found = json.loads(ckpt("verify", copied, "--json").out)
    assert not found["ok"]
    assert [bool(each["problems"]) for each in found["checkpoints"]][:2] == [True, False]


def test_the_digest_is_the_one_that_the_run_printed(made: Made, ckpt: Ckpt) -> None:
    end = list(read_lines(made.parts / "events.jsonl"))[-1]
    assert ckpt("digest", made.parts).out == f"{end['digest']}\n"
    assert json.loads(ckpt("digest", made.whole, "--json").out)["digest"] == end["digest"], "no pause made a difference"
    earlier = ckpt("digest", made.parts, "--step", 80)
    assert earlier.code == 0
    assert earlier.out != f"{end['digest']}\n"
    assert ckpt("digest", made.parts / "checkpoints" / "step-80") == earlier


def test_diff(made: Made, ckpt: Ckpt) -> None:
    equal = ckpt("diff", made.whole, made.parts)
    assert equal.code == 0
    assert "equal in all" in equal.out
    assert ckpt("diff", made.whole, made.parts, "--step", 80).code == 0
    differ = ckpt("diff", made.whole, made.parts, "--step", 80, "--other-step", 88)
    assert differ.code == 3
    lines = differ.out.splitlines()
    assert lines[0].startswith("model/0.weight: ")
    assert lines[1].startswith("model/1.weight: ")
    found = json.loads(ckpt("diff", made.whole / "checkpoints" / "step-80", made.parts, "--json").out)
    assert not found["equal"]
    assert len(found["differences"]) == len(lines) - 1


def test_export(made: Made, ckpt: Ckpt, tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    assert ckpt("export", made.parts, target).code == 0
    latest = made.parts / "checkpoints" / "step-88"
    saved = load_weights(latest)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in load_file(target).items())
    refused = ckpt("export", made.parts, target)
    assert (refused.code, "--overwrite" in refused.err) == (2, True)
    assert ckpt("export", made.parts, target, "--overwrite", "--step", 80, "--weights", "average").code == 0
    average = load_weights(latest.with_name("step-80"), "average")
    assert torch.equal(load_file(target)["0.weight"], average["0.weight"])


def test_export_of_the_best(tmp_path: Path, ckpt: Ckpt) -> None:
    for step in (1, 2):
        save(tmp_path, step, {"model": {"w": torch.full((2,), float(step))}}, is_best=step == 1)
    best, newest = tmp_path / "best.pt", tmp_path / "newest.pt"
    assert json.loads(ckpt("export", tmp_path, best, "--best", "--json").out)["source"].endswith("step-1")
    assert ckpt("export", tmp_path, newest).code == 0
    assert torch.load(best, weights_only=True)["w"].tolist() == [1, 1]
    assert torch.load(newest, weights_only=True)["w"].tolist() == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["ls", "missing"], "missing is not a folder"),
        (["ls", "empty"], "empty has no checkpoints"),
        (["ls", "parts/checkpoints/step-88"], "is one checkpoint: expected a run folder"),
        (["audit", "missing"], "missing is not a folder"),
        (["verify", "parts", "--step", "7"], "--step 7: parts has checkpoints of 88, 80"),
        (["verify", "empty/file"], "is not a folder"),
        (["digest", "parts/checkpoints/step-88", "--step", "80"], "is the checkpoint of step 88"),
        (["digest", "renamed"], "is a checkpoint under another name"),
        (["diff", "parts", "whole", "--other-step", "7"], "--other-step 7: whole has checkpoints of"),
        (["export", "parts", "model.bmp"], "model.bmp: expected a file name that ends in .safetensors"),
        (["export", "parts", "m.pt", "--best", "--step", "80"], "--best and --step 80"),
        (["export", "parts/checkpoints/step-88", "m.pt", "--best"], "is one checkpoint: --best chooses"),
    ],
)
def test_a_mistake_is_a_clear_line(
    made: Made, ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str
) -> None:
    folder = made.parts.parent
    if not (folder / "empty").exists():
        (folder / "empty").mkdir()
        (folder / "empty" / "file").touch()
        shutil.copytree(made.parts / "checkpoints" / "step-88", folder / "renamed")
    monkeypatch.chdir(folder)
    finished = ckpt(*arguments)
    assert finished.code == 2, finished
    assert told in finished.err
    assert finished.err.count("\n") == 1


def test_checkpoints_that_a_stranger_has_made(tmp_path: Path, ckpt: Ckpt) -> None:
    for step in (1, 2):
        save(tmp_path, step, {"model": {"\x1b[2J": torch.full((2,), float(step))}}, {"metrics": {"\x1b[2J": 1}})
    differ = ckpt("diff", tmp_path, tmp_path, "--step", 1, "--other-step", 2)
    assert (differ.code, "\x1b" in differ.out) == (3, False)
    assert "\x1b" not in ckpt("ls", tmp_path).out
    save(tmp_path, 3, {"optimizer": [1, 2]})
    odd = ckpt("digest", tmp_path)
    assert odd.code == 3
    assert odd.err.endswith("step-3: does not hold what a run saves\n")


def test_nothing_of_the_run_is_changed(made: Made, ckpt: Ckpt) -> None:
    def contents() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in made.parts.rglob("*")}

    before = contents()
    for command in ("ls", "verify", "audit", "digest"):
        ckpt(command, made.parts)
    assert contents() == before


@pytest.mark.parametrize("command", ["ls", "verify", "audit", "digest", "diff", "export"])
def test_help_says_what_it_does_and_loads_no_torch(command: str) -> None:
    text = help_of("ckpt", command)
    assert "--json" in text
    if command in ("verify", "audit", "diff"):
        assert "Exit code 0" in text
