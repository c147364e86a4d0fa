"""A full, read-only or missing disk costs saves, with a warning, but neither the run nor earlier checkpoints."""

import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.checkpoint.checkpoint_store import CheckpointStore
from lockstep.checkpoint.ledger import read_ledger
from lockstep.checkpoint.manifest import CheckpointError
from lockstep.events.jsonl import read_jsonl
from tests.commands import run as run_command
from tests.faults.disk_runs import PAGE, STEPS, fill, make_room, mounted, train

DISK_BYTES = 4 * 2**20


@pytest.fixture(scope="module")
def digest() -> str:
    """The digest of a run without disk trouble."""
    return train(None)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none") as place:
        yield place


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert all(text.isprintable() for text in found)
    return found


# How far a save gets: no file, a part of the first one, all but the manifest, all but the pointer …
@pytest.mark.parametrize("left_bytes", [0, *(pages * PAGE for pages in (20, 40, 64, 65, 66, 67))])
def test_a_full_disk(small_disk: Path, digest: str, caplog: pytest.LogCaptureFixture, left_bytes: int) -> None:
    run = small_disk / "run"
    store = CheckpointStore(run / "checkpoints")
    found: list[int] = []

    def look() -> None:
        damaged: list[str] = []
        newest = store.newest_intact(store.manifest(1).run_id, damaged.append)
        assert newest is not None
        assert damaged == []
        found.append(newest.manifest.step)

    actions = {3: lambda: fill(small_disk, left_bytes), 4: look, 5: lambda: (look(), make_room(small_disk))}
    assert train(run, actions) == digest
    assert found in ([2, 2], [3, 3], [2, 3], [3, 4]), found
    warned = [text for text in warnings(caplog) if text.startswith("step ")]
    assert warned, "no warning about a full disk"
    assert all("No space left on device" in text for text in warned)
    assert all(text.startswith(("step 3", "step 4")) for text in warned)
    for step, newest in zip((3, 4), found, strict=True):
        is_said_lost = any(
            text.startswith(f"step {step} could not be saved, and training continues:") for text in warned
        )
        assert is_said_lost == (newest < step)
    assert [text for text in warnings(caplog) if "lines are being lost" in text] in (
        [],
        [f"{run}/events.jsonl: lines are being lost: No space left on device"],
    )
    assert store.steps()[0] == STEPS
    for step in store.steps():
        store.load(step)  # raises if it is damaged
    assert {path.name for path in store.folder.iterdir()} == {"LATEST", *(f"step-{step}" for step in store.steps())}
    events = list(read_jsonl(run / "events.jsonl"))
    assert {"start", "checkpoint", "end"} <= {event["kind"] for event in events}
    lines = {line["commit"]: line for line in read_ledger(run / "ledger.jsonl")}
    commit = store.manifest(STEPS).commit
    batches: list[int] = []
    while commit is not None:  # back to the first commit, with no line missing
        batches = [*(batch for span in lines[commit]["spans"] for batch in range(*span["batches"])), *batches]
        commit = lines[commit]["parent"]
    assert batches == list(range(STEPS))


SCRIPT = """
import sys, pathlib
from tests.faults.disk_runs import fill, train
run, disk = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
import lockstep
def main(world):
    print("digest", train(run, {6: lambda: fill(disk)} if "fill" in sys.argv else {}))
lockstep.launch(main, device="cpu")
"""


def test_a_final_save_that_fails_ends_with_an_error_and_the_run_can_resume(
    small_disk: Path, tmp_path: Path, digest: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(small_disk / "run"), str(small_disk)]
    root = Path(__file__).parents[2]
    environment = {"PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"}
    failed = run_command([*command, "fill"], tmp_path, environment)
    assert failed.code == 3, failed.err
    assert "step 6, the run's end, could not be saved" in failed.err
    assert "Traceback" not in failed.err
    assert CheckpointStore(small_disk / "run" / "checkpoints").steps() == [5, 4, 3]
    make_room(small_disk)
    again = run_command(command, tmp_path, environment)
    assert again.code == 0, again.err
    assert f"digest {digest}" in again.out


def test_a_folder_that_becomes_read_only(tmp_path: Path, digest: str, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    mount = mounted(checkpoints, "--bind", str(checkpoints))

    def forbid() -> None:
        mount.__enter__()
        subprocess.run(["mount", "-o", "remount,ro,bind", str(checkpoints)], check=True)

    assert train(tmp_path / "run", {3: forbid, 5: lambda: mount.__exit__()}) == digest
    warned = warnings(caplog)
    assert len(warned) == 2
    assert all("could not be saved, and training continues: rank 0: Read-only file system" in text for text in warned)
    assert CheckpointStore(checkpoints).steps() == [6, 5, 2]


def test_a_run_folder_that_vanishes_and_comes_back(
    tmp_path: Path, digest: str, caplog: pytest.LogCaptureFixture
) -> None:
    run, away = tmp_path / "run", tmp_path / "away"
    assert train(run, {3: lambda: run.rename(away), 5: lambda: away.rename(run)}) == digest
    warned = warnings(caplog)
    assert len(warned) == 2
    assert all(
        "could not be saved, and training continues: rank 0: No such file or directory" in text for text in warned
    )
    assert CheckpointStore(run / "checkpoints").steps() == [6, 5, 2]
    assert {line["step"] for line in read_ledger(run / "ledger.jsonl")} == {1, 2, 5, 6}


def test_a_run_folder_that_is_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    with pytest.raises(
        CheckpointError, match="step 6, the run's end, could not be saved: correct the problem reported above"
    ):
        train(run, {3: lambda: shutil.rmtree(run)})
    assert not run.exists(), "a deleted run folder was recreated"
    assert len(warnings(caplog)) == 5, "one warning for each failed save; the last one was tried twice"


def test_a_deleted_checkpoints_folder_is_recreated(
    tmp_path: Path, digest: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    assert train(run, {4: lambda: shutil.rmtree(run / "checkpoints")}) == digest
    assert CheckpointStore(run / "checkpoints").steps() == [6, 5, 4]
    assert not warnings(caplog)
