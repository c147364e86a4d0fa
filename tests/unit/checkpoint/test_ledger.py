"""Every commit has its line, also where a kill or a full disk kept it out at first."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint.ledger import read_ledger, write_line
from lockstep.checkpoint.manifest import CheckpointError
from lockstep.checkpoint.store import Store
from tests.checkpoints import save


def commit(folder: Path, step: int, parent: Any) -> str:
    facts = {"ledger": {"parent": parent, "spans": [step]}}
    save(folder, step, {"model": {"x": torch.ones(1)}}, facts)
    return Store(folder).manifest(step).commit


def test_a_line_is_written_once(tmp_path: Path) -> None:
    store, path = Store(tmp_path / "checkpoints"), tmp_path / "ledger.jsonl"
    name = commit(store.folder, 1, None)
    for _ in range(2):
        write_line(path, store.manifest(1), store)
    assert list(read_ledger(path)) == [{"commit": name, "step": 1, "parent": None, "spans": [1]}]


def test_a_torn_line_is_kept_apart(tmp_path: Path) -> None:
    store, path = Store(tmp_path / "checkpoints"), tmp_path / "ledger.jsonl"
    commit(store.folder, 1, None)
    path.write_bytes(b'{"commit": "torn')
    write_line(path, store.manifest(1), store)
    assert [line["step"] for line in read_ledger(path)] == [1]


def test_lines_that_were_lost_are_made_up_for(tmp_path: Path) -> None:
    store, path = Store(tmp_path / "checkpoints"), tmp_path / "ledger.jsonl"
    parent = None
    for step in (1, 2, 3, 4):
        parent = commit(store.folder, step, parent)
    write_line(path, store.manifest(1), store)
    write_line(path, store.manifest(4), store)  # nobody could write those of 2 and 3
    assert [line["step"] for line in read_ledger(path)] == [1, 2, 3, 4]


def test_a_parent_that_is_gone_ends_it(tmp_path: Path) -> None:
    store, path = Store(tmp_path / "checkpoints"), tmp_path / "ledger.jsonl"
    name = commit(store.folder, 1, "f" * 16)
    commit(store.folder, 2, name)
    (store.folder / "step-1" / "manifest.json").unlink()
    write_line(path, store.manifest(2), store)
    assert [line["step"] for line in read_ledger(path)] == [2]


@pytest.mark.parametrize("ledger", [None, [], {"parent": []}, {"parent": 5}])
def test_what_is_no_ledger_line_is_refused(tmp_path: Path, ledger: Any) -> None:
    store = Store(tmp_path / "checkpoints")
    save(store.folder, 1, {"model": {}}, {"ledger": ledger})
    with pytest.raises(CheckpointError, match="step 1 does not say which samples"):
        write_line(tmp_path / "ledger.jsonl", store.manifest(1), store)


def test_a_ledger_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    store = Store(tmp_path / "checkpoints")
    commit(store.folder, 1, None)
    with pytest.raises(FileNotFoundError):
        write_line(tmp_path / "gone" / "ledger.jsonl", store.manifest(1), store)
    assert not (tmp_path / "gone").exists()
