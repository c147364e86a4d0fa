"""A checkpoint whose content no run would have saved is damaged, though its hashes fit: the one before it is used."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.checkpoint.checkpoint_store import CheckpointStore
from lockstep.errors import Stopped, UserError
from lockstep.events.jsonl import read_jsonl
from lockstep.train.resume.resume_checks import check_resumable
from lockstep.train.run import Run
from lockstep.world.world import World
from tests.classification import DATA, loss
from tests.forged import forge_manifest

Change = Callable[[dict[str, Any]], object]
OptimizerFactory = Callable[[Any], torch.optim.Optimizer]


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1)


def train(folder: Path, stop_after: int | None = None, optimizer: OptimizerFactory = adam) -> None:
    run = Run(folder, World(), sinks=[])
    run.stop_after = stop_after
    try:
        model = run.prepare(nn.Linear(4, 3))
        prepared = run.optimizer(model, optimizer)
        for step in run.steps(run.loader(DATA, 16), epochs=2):
            step.accumulate(loss, model)
            step.update(prepared)
            if step.every(2):
                run.save()
    finally:
        run.close()


def setting(*place: str | int, to: Any) -> Change:
    def change(content: Any) -> None:
        for key in place[:-1]:
            content = content[key]
        content[place[-1]] = to

    return change


def without(*place: str) -> Change:
    def change(content: Any) -> None:
        for key in place[:-1]:
            content = content[key]
        del content[place[-1]]

    return change


POSITION, LEDGER, OPTIMIZER = ("facts", "position"), ("facts", "ledger"), ("forms", "optimizer")

DAMAGES: dict[str, tuple[Change, str]] = {
    "no position": (without(*POSITION), "has no position"),
    "a position that is a list": (setting(*POSITION, to=[]), "has no position"),
    "no step": (without(*POSITION, "step"), "has no valid step"),
    "a step that is text": (setting(*POSITION, "step", to="x"), "has no valid step"),
    "a step below zero": (setting(*POSITION, "step", to=-1), "has no valid step"),
    "a step that is true": (setting(*POSITION, "step", to=True), "has no valid step"),
    "a step that is endless": (setting(*POSITION, "step", to=10**400), "has no valid step"),
    "a step with a fraction": (setting(*POSITION, "step", to=4.0), "has no valid step"),
    "another step": (setting(*POSITION, "step", to=3), "has the position of another step"),
    "no length": (without(*POSITION, "asked_steps"), "has no valid asked_steps"),
    "an end that is a number": (setting(*POSITION, "is_done", to=0), "has no valid is_done"),
    "no fingerprint": (without("facts", "fingerprint"), "has no fingerprint"),
    "no ledger": (without(*LEDGER), "does not say which samples it has consumed"),
    "an attempt of 4,300 digits": (setting(*LEDGER, "attempt", to=10**4299), "expected a whole number"),
    "no spans": (without(*LEDGER, "spans"), "has no list of spans"),
    "no loader": (without("forms", "loader"), "has no position in the data"),
    "a model that is a list": (setting("forms", "model", to=[]), "has no names in model"),
    "no groups": (setting(*OPTIMIZER, "groups", to={}), "has no groups in optimizer"),
    "a group of nothing": (setting(*OPTIMIZER, "groups", 0, "params", to=None), "lacks the state of parameters"),
    "a group of strangers": (setting(*OPTIMIZER, "groups", 0, "params", to=["x"]), "lacks the state of parameters"),
    "no state": (setting(*OPTIMIZER, "state", to=[]), "has no state by parameter"),
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that was stopped after its fourth step."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(Stopped):
        train(folder, stop_after=4)
    return folder


@pytest.mark.parametrize(("change", "problem"), DAMAGES.values(), ids=list(DAMAGES))
def test_a_checkpoint_with_the_wrong_content_is_damaged(
    stopped: Path, tmp_path: Path, change: Change, problem: str
) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    check_resumable(store.load(4))
    forge_manifest(store.path(4), change)
    damaged: list[str] = []
    found = store.newest_intact(store.manifest(2).run_id, damaged.append, check_resumable)
    assert found is not None
    assert found.manifest.step == 2
    (line,) = damaged
    assert line.startswith(f"{store.path(4)}: manifest.json ")
    assert problem in line
    assert line.isprintable()


def test_a_resume_reports_it_and_continues_from_the_one_before(stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    forge_manifest(tmp_path / "run/checkpoints/step-4", without(*POSITION))
    train(tmp_path / "run")
    events = list(read_jsonl(tmp_path / "run" / "events.jsonl"))
    assert [event["step"] for event in events if event["kind"] == "start"] == [0, 2]
    assert events[-1]["kind"] == "end"


@pytest.mark.parametrize(("key", "value"), [("lr", "x"), ("lr", None), ("betas", [0.9]), ("maximize", "yes")])
def test_a_setting_of_another_kind_is_refused_in_one_line(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(Stopped):
        train(tmp_path / "run", stop_after=2)
    forge_manifest(tmp_path / "run/checkpoints/step-2", setting(*OPTIMIZER, "groups", 0, key, to=value))
    with pytest.raises(UserError, match=f"optimizer was saved with {key}=.*: expected a value like"):
        train(tmp_path / "run")


class OptimizerWithHistory(torch.optim.SGD):
    """Keeps settings in its groups that change in kind and length, and state of every kind."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.param_groups[0] |= {"losses": [], "seen": (), "mode": "train", "is_warm": 0}

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        group = self.param_groups[0]
        group["losses"].append(1.0)
        group |= {"seen": (*group["seen"], 1), "mode": None, "is_warm": True}
        for parameter in group["params"]:
            self.state[parameter] |= {"name": "w", "none": None, "past": [torch.ones(2), None], "by": {3: {"x": 1}}}
        return result


def test_an_optimizer_of_the_scripts_own_may_keep_anything(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        train(tmp_path / "run", stop_after=4, optimizer=OptimizerWithHistory)
    train(tmp_path / "run", optimizer=OptimizerWithHistory)
    events = list(read_jsonl(tmp_path / "run" / "events.jsonl"))
    assert [event["step"] for event in events if event["kind"] == "start"] == [0, 4]
    (group,) = CheckpointStore(tmp_path / "run" / "checkpoints").load(8).values["optimizer"]["groups"]
    assert (group["losses"], group["mode"]) == ([1.0] * 8, None)


def test_an_attempt_of_thousands_of_digits_is_ignored(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        train(tmp_path / "run", stop_after=2)
    with (tmp_path / "run" / "events.jsonl").open("a") as file:
        for number in ("9" * 4300, "9" * 4301, "true", "-1", "1e999", "NaN", str(2**62)):
            file.write(f'{{"t": 1, "attempt": {number}, "step": 2, "kind": "start"}}\n')
    train(tmp_path / "run")
    last = list(read_jsonl(tmp_path / "run" / "events.jsonl"))[-1]
    assert (last["kind"], last["attempt"]) == ("end", 2)
