"""The saver on one process; tests/ranks/test_async_saver.py has the tests on several."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint.async_saver import SaveContent, Saver
from lockstep.checkpoint.checkpoint_store import CheckpointStore, Retention
from lockstep.checkpoint.manifest import CheckpointError, Manifest
from lockstep.world.world import World
from tests.checkpoints import RUN_ID, save, try_to_save


def parts(value: float = 1.0) -> dict[str, Any]:
    return {"model": {"x": torch.tensor([value])}}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_failed_save_keeps_the_last_good_one_and_leaves_no_files(tmp_path: Path) -> None:
    save(tmp_path, 1, parts())
    (tmp_path / ".draft-step-2-1-1").touch()
    outcome = try_to_save(tmp_path, 2, parts())
    assert outcome.commit is None
    assert outcome.problem is not None
    assert outcome.problem.startswith("rank 0: ")
    assert "Not a directory" in outcome.problem
    assert names(tmp_path) == {"LATEST", "step-1"}
    save(tmp_path, 2, parts())


def test_a_pointer_that_cannot_be_written_does_not_undo_the_commit(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, parts())
    (tmp_path / "LATEST").unlink()
    (tmp_path / "LATEST").mkdir()
    written: list[Manifest] = []
    saver = Saver(tmp_path, World(), RUN_ID, attempt=1)
    saver.save(SaveContent(3, parts(), {}), Retention(1), written.append)
    outcome = saver.wait()
    saver.close()
    assert outcome is not None
    assert outcome.commit == CheckpointStore(tmp_path).manifest(3).commit
    assert outcome.problem is not None
    assert "LATEST" in outcome.problem
    assert [manifest.step for manifest in written] == [3], "the ledger gets its line, whatever else goes wrong"
    assert CheckpointStore(tmp_path).steps() == [3, 2, 1], "nothing is pruned after a problem"


def test_metadata_that_json_cannot_hold_is_a_failed_save(tmp_path: Path) -> None:
    save(tmp_path, 1, parts())
    for facts in ({"x": float("nan")}, {"x": object()}, {"x": 10**5000}):
        outcome = try_to_save(tmp_path, 2, parts(), facts)
        assert outcome.commit is None
        assert outcome.problem is not None
        assert outcome.problem.startswith(("ValueError", "TypeError"))
    assert names(tmp_path) == {"LATEST", "step-1"}


def test_a_part_name_must_be_a_plain_file_name(tmp_path: Path) -> None:
    saver = Saver(tmp_path, World(), RUN_ID, attempt=1)
    with pytest.raises(CheckpointError, match="cannot name a part"):
        saver.save(SaveContent(1, {"../model": {}}, {}), Retention())
    assert saver.wait() is None
    saver.close()
    assert names(tmp_path) == set()


def test_no_thread_is_left_after_wait(tmp_path: Path) -> None:
    saver = Saver(tmp_path, World(), RUN_ID, attempt=1)
    for step in range(20):
        saver.save(SaveContent(step, parts(), {}), Retention(1))
        assert saver.wait() is not None
        assert "lockstep-save" not in {thread.name for thread in threading.enumerate()}
    saver.close()
