"""Every commit gets its line in the ledger, even if a kill or a full disk prevented it at first."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint.checkpoint_store import CheckpointStore
from lockstep.checkpoint.ledger import append_to_ledger, read_ledger
from lockstep.checkpoint.manifest import CheckpointError
from tests.checkpoints import save


def commit(folder: Path, step: int, parent: Any) -> str:
    facts = {"ledger": {"parent": parent, "spans": [step]}}
    save(folder, step, {"model": {"x": torch.ones(1)}}, facts)
    return CheckpointStore(folder).manifest(step).commit


def test_a_line_is_written_only_once(tmp_path: Path) -> None:
    store, path = CheckpointStore(tmp_path / "checkpoints"), tmp_path / "ledger.jsonl"
    name = commit(store.folder, 1, None)
    for _ in range(2):
        append_to_ledger(path, store.manifest(1), store)
    assert list(read_ledger(path)) == [{"commit": name, "step": 1, "parent": None, "spans": [1]}]


def test_a_torn_line_does_not_spoil_the_next(tmp_path: Path) -> None:
    store, path = CheckpointStore(tmp_path / "checkpoints"), tmp_path / "ledger.jsonl"
    commit(store.folder, 1, None)
    path.write_bytes(b'{"commit": "torn')
    append_to_ledger(path, store.manifest(1), store)
    assert [line["step"] for line in read_ledger(path)] == [1]


def test_missing_lines_of_parents_are_added(tmp_path: Path) -> None:
    store, path = CheckpointStore(tmp_path / "checkpoints"), tmp_path / "ledger.jsonl"
    parent = None
    for step in (1, 2, 3, 4):
        parent = commit(store.folder, step, parent)
    append_to_ledger(path, store.manifest(1), store)
    append_to_ledger(path, store.manifest(4), store)  # those of 2 and 3 could not be written
    assert [line["step"] for line in read_ledger(path)] == [1, 2, 3, 4]


def test_a_parent_that_was_pruned_is_skipped(tmp_path: Path) -> None:
    store, path = CheckpointStore(tmp_path / "checkpoints"), tmp_path / "ledger.jsonl"
    name = commit(store.folder, 1, "f" * 16)
    commit(store.folder, 2, name)
    (store.folder / "step-1" / "manifest.json").unlink()
    append_to_ledger(path, store.manifest(2), store)
    assert [line["step"] for line in read_ledger(path)] == [2]


@pytest.mark.parametrize("ledger", [None, [], {"parent": []}, {"parent": 5}])
def test_invalid_metadata_is_refused(tmp_path: Path, ledger: Any) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store.folder, 1, {"model": {}}, {"ledger": ledger})
    with pytest.raises(CheckpointError, match="step 1 does not say which samples"):
        append_to_ledger(tmp_path / "ledger.jsonl", store.manifest(1), store)


def test_a_ledger_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    commit(store.folder, 1, None)
    with pytest.raises(FileNotFoundError):
        append_to_ledger(tmp_path / "gone" / "ledger.jsonl", store.manifest(1), store)
    assert not (tmp_path / "gone").exists()
