"""`lockstep ckpt` on a real run that was stopped, killed and resumed on other numbers of processes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import typer.main
from safetensors.torch import load_file

from lockstep.checkpoint.checkpoint_store import load_weights
from lockstep.cli import app
from lockstep.errors import LockstepError, print_error
from lockstep.events.jsonl import read_jsonl
from tests.checkpoints import save
from tests.commands import LOCKSTEP, Finished, help_of, run, started, wait_for

SETTINGS = ["epochs=4", "checkpoint.every=10", "checkpoint.keep=2", "best={metric: accuracy, mode: max}"]
SETTINGS += ["average={decay: 0.9}"]


class Runs(NamedTuple):
    """Two runs with the same result: 22 batches per epoch, which drop 29 of 1,437 samples."""

    whole: Path  # trained without a pause
    parts: Path  # on 2 processes, stopped after step 25, then killed; then on 1 process to the end


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    train = [*LOCKSTEP, "train", "digits", *SETTINGS, "--quiet"]
    assert run([*train, "--run", "whole"], folder).code == 0
    assert run([*train, "-n", "2", "--stop-after", "25", "--run", "parts"], folder).code == 75
    with started([*train, "-n", "2", "--run", "parts"], folder):
        ledger = folder / "parts" / "ledger.jsonl"
        wait_for(lambda: any(line["attempt"] == 2 for line in read_jsonl(ledger)), 60, "a commit of the second attempt")
    finished = run([*train, "--run", "parts"], folder)
    assert finished.code == 0, finished.err
    return Runs(folder / "whole", folder / "parts")


@pytest.fixture
def copied(runs: Runs, tmp_path: Path) -> Path:
    """Copy a run, to damage the copy."""
    return Path(shutil.copytree(runs.parts, tmp_path / "copied"))


Ckpt = Callable[..., Finished]


@pytest.fixture
def ckpt(capsys: pytest.CaptureFixture[str]) -> Ckpt:
    """Call the command in this process: importing torch for each call would take most of the time."""

    def call(*arguments: object) -> Finished:
        capsys.readouterr()
        try:
            command = typer.main.get_command(app)
            code = command.main(["ckpt", *map(str, arguments)], "lockstep", standalone_mode=False)
        except LockstepError as error:
            code = print_error(error)
        return Finished(code or 0, *capsys.readouterr())

    return call


def test_the_audit_through_the_real_command(runs: Runs) -> None:
    finished = run([*LOCKSTEP, "ckpt", "audit", str(runs.parts)], runs.parts)
    assert finished.code == 0, finished.out + finished.err
    assert finished.err == ""
    assert finished.out.startswith("4 finished epochs: each of 1,437 samples exactly once or dropped (29 per epoch); ")
    assert "3 attempts on 2, 2 and 1 processes" in finished.out
    refused = run([*LOCKSTEP, "ckpt", "audit", "checkpoints"], runs.parts)
    assert refused == (2, "", "lockstep: checkpoints is not a run folder: it has neither run.json nor ledger.jsonl\n")


def test_an_altered_ledger_is_found_by_the_real_command(copied: Path) -> None:
    ledger = copied / "ledger.jsonl"
    lines = list(read_jsonl(ledger))
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


def test_ls(runs: Runs, ckpt: Ckpt) -> None:
    listed = json.loads(ckpt("ls", runs.parts, "--json").out)
    steps = [entry["step"] for entry in listed]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] == 88
    assert [entry["is_latest"] for entry in listed] == [True] + [False] * (len(listed) - 1)
    assert sum(entry["is_best"] for entry in listed) == 1
    lines = ckpt("ls", runs.parts).out.splitlines()
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


def test_verify(runs: Runs, copied: Path, ckpt: Ckpt) -> None:
    assert ckpt("verify", runs.parts).code == 0
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


def test_the_digest_is_the_one_that_the_run_printed(runs: Runs, ckpt: Ckpt) -> None:
    end = list(read_jsonl(runs.parts / "events.jsonl"))[-1]
    assert ckpt("digest", runs.parts).out == f"{end['digest']}\n"
    assert json.loads(ckpt("digest", runs.whole, "--json").out)["digest"] == end["digest"], "pauses make no difference"
    earlier = ckpt("digest", runs.parts, "--step", 80)
    assert earlier.code == 0
    assert earlier.out != f"{end['digest']}\n"
    assert ckpt("digest", runs.parts / "checkpoints" / "step-80") == earlier


def test_diff(runs: Runs, ckpt: Ckpt) -> None:
    equal = ckpt("diff", runs.whole, runs.parts)
    assert equal.code == 0
    assert "equal in all" in equal.out
    assert ckpt("diff", runs.whole, runs.parts, "--step", 80).code == 0
    differ = ckpt("diff", runs.whole, runs.parts, "--step", 80, "--other-step", 88)
    assert differ.code == 3
    lines = differ.out.splitlines()
    assert lines[0].startswith("model/0.weight: ")
    assert lines[1].startswith("model/1.weight: ")
    found = json.loads(ckpt("diff", runs.whole / "checkpoints" / "step-80", runs.parts, "--json").out)
    assert not found["equal"]
    assert len(found["differences"]) == len(lines) - 1


def test_export(runs: Runs, ckpt: Ckpt, tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    assert ckpt("export", runs.parts, target).code == 0
    latest = runs.parts / "checkpoints" / "step-88"
    saved, exported = load_weights(latest), load_file(target)
    assert exported.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in exported.items())
    refused = ckpt("export", runs.parts, target)
    assert (refused.code, "--overwrite" in refused.err) == (2, True)
    assert ckpt("export", runs.parts, target, "--overwrite", "--step", 80, "--weights", "average").code == 0
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
    ("arguments", "message"),
    [
        (["ls", "missing"], "missing is not a folder"),
        (["ls", "empty"], "empty has no checkpoints"),
        (["ls", "parts/checkpoints/step-88"], "is one checkpoint: expected a run folder"),
        (["audit", "missing"], "missing is not a folder"),
        (["verify", "parts", "--step", "7"], "--step 7: parts has checkpoints of steps 88, 80"),
        (["verify", "empty/file"], "is not a folder"),
        (["digest", "parts/checkpoints/step-88", "--step", "80"], "is the checkpoint of step 88"),
        (["digest", "renamed"], "is a checkpoint that was renamed"),
        (["diff", "parts", "whole", "--other-step", "7"], "--other-step 7: whole has checkpoints of steps"),
        (["export", "parts", "model.bmp"], "model.bmp: expected a file name that ends in .safetensors"),
        (["export", "parts", "m.pt", "--best", "--step", "80"], "--best and --step 80"),
        (["export", "parts/checkpoints/step-88", "m.pt", "--best"], "is one checkpoint: --best chooses"),
    ],
)
def test_a_mistake_is_a_clear_line(
    runs: Runs, ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    folder = runs.parts.parent
    if not (folder / "empty").exists():
        (folder / "empty").mkdir()
        (folder / "empty" / "file").touch()
        shutil.copytree(runs.parts / "checkpoints" / "step-88", folder / "renamed")
    monkeypatch.chdir(folder)
    finished = ckpt(*arguments)
    assert finished.code == 2, finished
    assert message in finished.err
    assert finished.err.count("\n") == 1


def test_untrusted_names_are_printed_without_control_characters(tmp_path: Path, ckpt: Ckpt) -> None:
    for step in (1, 2):
        save(tmp_path, step, {"model": {"\x1b[2J": torch.full((2,), float(step))}}, {"metrics": {"\x1b[2J": 1}})
    differ = ckpt("diff", tmp_path, tmp_path, "--step", 1, "--other-step", 2)
    assert (differ.code, "\x1b" in differ.out) == (3, False)
    assert "\x1b" not in ckpt("ls", tmp_path).out
    save(tmp_path, 3, {"optimizer": [1, 2]})
    odd = ckpt("digest", tmp_path)
    assert odd.code == 3
    assert odd.err.endswith("step-3: does not contain the state of a run\n")


def test_no_command_changes_the_run(runs: Runs, ckpt: Ckpt, tmp_path: Path) -> None:
    def contents() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in runs.parts.rglob("*")}

    before = contents()
    for command in (["ls"], ["verify"], ["audit"], ["digest"], ["diff", runs.whole], ["export", tmp_path / "model.pt"]):
        name, *more = command
        assert ckpt(name, runs.parts, *more).code == 0
    assert contents() == before


@pytest.mark.parametrize("command", ["ls", "verify", "audit", "digest", "diff", "export"])
def test_help_says_what_it_does_and_loads_no_torch(command: str) -> None:
    text = help_of(f"ckpt {command}")
    assert "--json" in text
    if command in ("verify", "audit", "diff"):
        assert "Exit code 0" in text
