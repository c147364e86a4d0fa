"""The list of checkpoints, and the examination of their files."""

import shutil
from pathlib import Path

import pytest
import torch

from lockstep.checkpoint.catalogue import entries, examine
from lockstep.checkpoint.store import Store
from tests.checkpoints import save


@pytest.fixture
def store(tmp_path: Path) -> Store:
    facts = {"ledger": {"processes": 2}, "metrics": {"accuracy": 0.5}, "saved_at": "2030-01-01T00:00:00Z"}
    for step in (10, 20, 30):
        parts = {"model": {"w": torch.full((100,), float(step))}, "optimizer": {"state": {"a": torch.zeros(3)}}}
        save(tmp_path, step, parts, facts, is_best=step == 20)
    return Store(tmp_path)


def test_the_list(store: Store) -> None:
    found = list(entries(store))
    assert [entry.step for entry in found] == [30, 20, 10]
    assert [entry.is_latest for entry in found] == [True, False, False]
    assert [entry.is_best for entry in found] == [False, True, False]
    size = sum(path.stat().st_size for path in store.path(30).glob("*.safetensors"))
    assert found[0][2:7] == (None, size, "2030-01-01T00:00:00Z", 2, {"accuracy": 0.5})


def test_a_damaged_manifest_is_listed_and_is_not_the_latest(store: Store) -> None:
    (store.path(30) / "manifest.json").write_text("no")
    found = list(entries(store))
    assert found[0].problem is not None
    assert "is damaged: it is not JSON" in found[0].problem
    assert [entry.is_latest for entry in found] == [False, True, False]


def test_facts_that_are_not_what_a_run_writes_are_left_out(tmp_path: Path) -> None:
    save(tmp_path, 1, {}, {"ledger": [1], "metrics": 7, "saved_at": {"a": 1}})
    save(tmp_path, 2, {}, {"ledger": {"processes": "two"}})
    for entry in entries(Store(tmp_path)):
        assert (entry.saved_at, entry.processes, entry.metrics) == (None, None, None)


def test_intact(store: Store) -> None:
    told: list[str] = []
    found = examine(store, 20, told.append)
    assert found is not None
    assert (found.problems, found.num_files) == ([], 2)
    assert told == ["step-20: model.safetensors (1 of 2)", "step-20: optimizer.safetensors (2 of 2)"]


def problems(store: Store, step: int) -> list[str]:
    found = examine(store, step)
    assert found is not None
    return found.problems


def test_everything_that_is_damaged_is_named(store: Store) -> None:
    model, optimizer = (store.path(20) / f"{part}.safetensors" for part in ("model", "optimizer"))
    content = bytearray(model.read_bytes())
    content[-1] ^= 1
    model.write_bytes(content)
    optimizer.unlink()
    first, second = problems(store, 20)
    assert first.endswith("model.safetensors does not match its hash")
    assert "optimizer.safetensors cannot be read" in second
    assert problems(store, 30) == []


def test_a_damaged_manifest(store: Store) -> None:
    (store.path(20) / "manifest.json").unlink()
    assert "manifest.json cannot be read" in problems(store, 20)[0]


def test_what_a_run_removes_meanwhile_is_not_damaged(store: Store) -> None:
    assert examine(store, 7) is None
    assert examine(store, 20, lambda _progress: shutil.rmtree(store.path(20), ignore_errors=True)) is None


def test_a_damaged_manifest_where_nothing_is_known_of_a_best(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, {"model": {"x": torch.ones(1)}})
    (tmp_path / "step-2" / "manifest.json").write_bytes(b"{}")
    assert [(entry.step, entry.is_best) for entry in entries(Store(tmp_path))] == [(2, False), (1, False)]
