"""Listing checkpoints, and comparing their files with their hashes."""

import shutil
from pathlib import Path

import pytest
import torch

from lockstep.checkpoint.checkpoint_store import CheckpointStore
from lockstep.ckpt.checkpoint_list import check_files, checkpoint_entries
from tests.checkpoints import save


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    facts = {"ledger": {"processes": 2}, "metrics": {"accuracy": 0.5}, "saved_at": "2030-01-01T00:00:00Z"}
    for step in (10, 20, 30):
        parts = {"model": {"w": torch.full((100,), float(step))}, "optimizer": {"state": {"a": torch.zeros(3)}}}
        save(tmp_path, step, parts, facts, is_best=step == 20)
    return CheckpointStore(tmp_path)


def test_checkpoints_are_listed_newest_first(store: CheckpointStore) -> None:
    found = list(checkpoint_entries(store))
    assert [entry.step for entry in found] == [30, 20, 10]
    assert [entry.is_latest for entry in found] == [True, False, False]
    assert [entry.is_best for entry in found] == [False, True, False]
    size = sum(path.stat().st_size for path in store.path(30).glob("*.safetensors"))
    assert found[0][2:7] == (None, size, "2030-01-01T00:00:00Z", 2, {"accuracy": 0.5})


def test_a_damaged_manifest_is_listed_and_is_not_the_latest(store: CheckpointStore) -> None:
    (store.path(30) / "manifest.json").write_text("no")
    found = list(checkpoint_entries(store))
    assert found[0].problem is not None
    assert "is damaged: it is not JSON" in found[0].problem
    assert [entry.is_latest for entry in found] == [False, True, False]


def test_metadata_of_unexpected_types_is_omitted(tmp_path: Path) -> None:
    save(tmp_path, 1, {}, {"ledger": [1], "metrics": 7, "saved_at": {"a": 1}})
    save(tmp_path, 2, {}, {"ledger": {"processes": "two"}})
    entries = list(checkpoint_entries(CheckpointStore(tmp_path)))
    assert [entry.step for entry in entries] == [2, 1]
    for entry in entries:
        assert (entry.problem, entry.saved_at, entry.processes, entry.metrics) == (None, None, None, None)


def test_intact_files_have_no_problems(store: CheckpointStore) -> None:
    progress: list[str] = []
    found = check_files(store, 20, progress.append)
    assert found is not None
    assert (found.problems, found.num_files) == ([], 2)
    assert progress == ["step-20: model.safetensors (1 of 2)", "step-20: optimizer.safetensors (2 of 2)"]


def problems(store: CheckpointStore, step: int) -> list[str]:
    found = check_files(store, step)
    assert found is not None
    return found.problems


def test_every_damaged_file_is_named(store: CheckpointStore) -> None:
    model, optimizer = (store.path(20) / f"{part}.safetensors" for part in ("model", "optimizer"))
    content = bytearray(model.read_bytes())
    content[-1] ^= 1
    model.write_bytes(content)
    optimizer.unlink()
    first, second = problems(store, 20)
    assert first.endswith("model.safetensors does not match its hash")
    assert "optimizer.safetensors cannot be read" in second
    assert problems(store, 30) == []


def test_a_missing_manifest_is_a_problem(store: CheckpointStore) -> None:
    (store.path(20) / "manifest.json").unlink()
    assert "manifest.json cannot be read" in problems(store, 20)[0]


def test_a_checkpoint_that_the_run_prunes_meanwhile_is_not_damaged(store: CheckpointStore) -> None:
    assert check_files(store, 7) is None
    assert check_files(store, 20, lambda _text: shutil.rmtree(store.path(20), ignore_errors=True)) is None


def test_a_damaged_manifest_in_a_run_without_a_best(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, {"model": {"x": torch.ones(1)}})
    (tmp_path / "step-2" / "manifest.json").write_bytes(b"{}")
    assert [(entry.step, entry.is_best) for entry in checkpoint_entries(CheckpointStore(tmp_path))] == [
        (2, False),
        (1, False),
    ]
