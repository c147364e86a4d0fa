"""Kills a save, or cuts its power, at every call that changes a file, and checks what is left.

    python -m tests.faults.ended_saves kill|cut FOLDER EVERY SCENARIO …

A test runs it in its own process: it forks for every try, which is not safe in a process with threads.
"""

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint.async_saver import SaveContent, Saver
from lockstep.checkpoint.checkpoint_contents import checkpoint_digest
from lockstep.checkpoint.checkpoint_store import CheckpointStore, Retention
from lockstep.checkpoint.ledger import append_to_ledger, read_ledger
from lockstep.world.world import World
from tests.checkpoints import RUN_ID
from tests.faults.disk_model import Disk, LosesAll, LosesSome
from tests.faults.system_calls import trace

_RANDOM_CUTS = 4  # at every point


@dataclass(frozen=True)
class Scenario:
    """A save of `step` after saves of the steps in `before`; those in `best` are marked as best."""

    step: int
    before: tuple[int, ...] = ()
    best: tuple[int, ...] = ()
    keep: int = 100
    stays: tuple[int, ...] = ()  # at least these, whenever the save ends

    def prepare(self, run: Path) -> None:
        run.mkdir(parents=True)
        for step in self.before:
            _save(run, step, f"before {step}", is_best=step in self.best)

    def save(self, run: Path) -> None:
        _save(run, self.step, "new", is_best=self.step in self.best, keep=self.keep)


SCENARIOS = {
    "first": Scenario(1),
    "next": Scenario(2, before=(1,), stays=(1,)),
    "again": Scenario(2, before=(1, 2), stays=(1, 2)),
    "best": Scenario(2, before=(1,), best=(1, 2), stays=(1,)),
    "prune": Scenario(4, before=(1, 2, 3), best=(1,), keep=1, stays=(1,)),
}


def content(words: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(len(words) * 256 + ord(words[-1]))
    return {
        "model": {"weight": torch.rand(8, 4, generator=generator), "half": torch.ones(3, dtype=torch.bfloat16)},
        "optimizer": {"state": {"weight": {"momentum": torch.rand(5, generator=generator)}}},
        "loader": {"words": words},
    }


def _save(run: Path, step: int, words: str, *, is_best: bool = False, keep: int = 100) -> None:
    saver = Saver(run / "checkpoints", World(), RUN_ID, attempt=1)
    facts = {"ledger": {"parent": None, "spans": []}}
    saver.save(
        SaveContent(step, content(words), facts, is_best),
        Retention(keep),
        lambda m: append_to_ledger(run / "ledger.jsonl", m, saver.store),
    )
    outcome = saver.wait()
    saver.close()
    assert outcome is not None, "no save was in progress"
    assert outcome.problem is None, outcome.problem


def kill_everywhere(scenario: Scenario, folder: Path, every: int) -> dict[str, Any]:
    """Kill the save before each call in turn, or every `every`-th, until it runs to its end."""
    before, run = folder / "before", folder / "run"
    scenario.prepare(before)
    found: list[str] = []
    was_killed = True
    while was_killed:
        shutil.copytree(before, run)
        was_killed = trace(lambda: scenario.save(run), run, kill_before=len(found) * every).was_killed
        found.append(_examine(run, scenario))
        CheckpointStore(run / "checkpoints").tidy()
        assert _examine(run, scenario) == found[-1], "tidy() has changed the checkpoints"
        _save_again(run, scenario)
        shutil.rmtree(run)
    assert found[-1] == "new", "the save that was not killed is missing"
    assert found == sorted(found, key=lambda each: each == "new"), "a commit was undone"
    return {"tries": len(found) - 1, "new": found.count("new") - 1}


def cut_power_everywhere(scenario: Scenario, folder: Path, every: int) -> dict[str, Any]:
    """Cut the power after each call, or every `every`-th, on a disk that loses all or some of what was not flushed."""
    run = folder / "here" / "run"
    scenario.prepare(run)
    disk = Disk(run.parent)
    calls = trace(lambda: scenario.save(run), run.parent).calls
    commit = next(i for i, call in enumerate(calls) if call.target.endswith(f"/step-{scenario.step}"))
    is_safe = next(i for i, call in enumerate(calls) if i > commit and call.kind == "flush")
    tries = 0
    for index in range(-1, len(calls)):
        if index >= 0:
            disk.apply(calls[index])
        if index % every and index < len(calls) - 1:
            continue
        for cut in (LosesAll(), *(LosesSome(seed) for seed in range(_RANDOM_CUTS))):
            left = folder / "left"
            disk.write_survivors(left, cut)
            newest = _examine(left / "run", scenario)
            assert newest == "new" or index < is_safe, f"lost after call {index}: {calls[index]}"
            if index == len(calls) - 1:
                _examine_end(left / "run", scenario)
            shutil.rmtree(left)
            tries += 1
    return {"tries": tries, "calls": len(calls)}


def _examine(run: Path, scenario: Scenario) -> str:
    """Return what the newest checkpoint is: "new", "old" or "none". All that are there must be intact."""
    store = CheckpointStore(run / "checkpoints")
    words = {step: _words(store, step) for step in store.steps()}
    problems: list[str] = []
    newest = store.newest_intact(RUN_ID, problems.append)
    assert not problems, problems
    assert (newest is None) == (not words)
    assert set(scenario.stays) <= words.keys(), f"{scenario.stays} must stay, and only {sorted(words)} are there"
    if not words:
        assert not scenario.before, "all checkpoints are lost"
        return "none"
    is_new = words.get(scenario.step) == "new"
    assert is_new or words.keys() >= set(scenario.before), "pruned before the new one was committed"
    assert max(words) == (scenario.step if is_new else max(scenario.before))
    assert all(word in ("new", f"before {step}") for step, word in words.items())
    best = {step for step in scenario.best if step in words and (step != scenario.step or is_new)}
    assert store.best() == max(best, default=None), "another one is the best"
    return "new" if is_new else "old"


def _words(store: CheckpointStore, step: int) -> str:
    values = store.load(step).values
    words: str = values["loader"]["words"]
    assert checkpoint_digest(values) == checkpoint_digest(content(words))
    return words


def _save_again(run: Path, scenario: Scenario) -> None:
    """Save once more, as the next process would. It must find no leftovers."""
    store = CheckpointStore(run / "checkpoints")
    if store.folder.exists():
        names = {path.name for path in store.folder.iterdir()}
        assert names <= {"LATEST", "BEST", *(f"step-{step}" for step in store.steps())}, names
    _save(run, 9, "new", keep=scenario.keep)
    assert _words(store, 9) == "new"
    assert {line["commit"] for line in read_ledger(run / "ledger.jsonl")} >= {store.manifest(9).commit}


def _examine_end(run: Path, scenario: Scenario) -> None:
    store = CheckpointStore(run / "checkpoints")
    commits = {line["commit"] for line in read_ledger(run / "ledger.jsonl")}
    assert commits >= {store.manifest(step).commit for step in store.steps()}, "a line is missing from the ledger"
    pointed = (store.folder / "LATEST").read_text().split()
    assert pointed == [f"step-{scenario.step}", store.manifest(scenario.step).commit]


_WAYS: Mapping[str, Callable[[Scenario, Path, int], dict[str, Any]]] = {
    "kill": kill_everywhere,
    "cut": cut_power_everywhere,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    way, place, every, *names = sys.argv[1:]
    for name in names:
        folder = Path(place, name)
        folder.mkdir()
        print(json.dumps({"scenario": name, **_WAYS[way](SCENARIOS[name], folder, int(every))}), flush=True)
