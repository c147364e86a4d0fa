"""Snapshots through the real command: processes are killed, little is lost, and result and ledger are the same."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lockstep.checkpoint.checkpoint_store import CheckpointStore
from lockstep.errors import EXIT_STOPPED
from lockstep.events.jsonl import read_jsonl
from lockstep.supervision.heartbeat import HeartbeatPage
from tests.commands import LOCKSTEP, Finished, is_running, run, started, wait_for
from tests.faults.disk_runs import mounted

# Nothing goes to the disk before the end.
TRAIN = [*LOCKSTEP, "train", "digits", "epochs=18", "checkpoint.every=5000", "--run", "run"]
RESTARTED = [*TRAIN, "-n", "2", "--max-restarts", "3"]


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the digest of a run that is not disturbed."""
    return digest_in(run(TRAIN, tmp_path_factory.mktemp("undisturbed")))


def digest_in(finished: Finished) -> str:
    assert finished.code == 0, finished.err
    found = re.search(r"^digest ([0-9a-f]{64})$", finished.out, re.MULTILINE)
    assert found is not None, finished.out
    return found[1]


def env(memory: Path) -> dict[str, str]:
    return {"LOCKSTEP_MEMORY": str(memory)}


def own_folders(memory: Path) -> list[Path]:
    return list(memory.glob(f"lockstep-{os.geteuid()}-*"))


def newest(memory: Path) -> int:
    """Return the step of the newest snapshot; 0 if there is none yet."""
    return max((step for folder in own_folders(memory) for step in CheckpointStore(folder).steps()), default=0)


def ranks(memory: Path) -> dict[int, int]:
    """Return the ranks' process ids."""
    found = {}
    for page in memory.glob("lockstep-agent-*/rank-*.heartbeat"):
        with suppress(OSError, ValueError):
            found[int(page.stem.removeprefix("rank-"))] = HeartbeatPage(page).read().pid
    return found


def starts(folder: Path) -> Iterator[tuple[int, str | None]]:
    for event in read_jsonl(folder / "run" / "events.jsonl"):
        if event["kind"] == "start":
            yield event["step"], event["resumed"]


def assert_audit_is_clean(folder: Path) -> None:
    audit = run([*LOCKSTEP, "ckpt", "audit", "run"], folder)
    assert audit.code == 0, audit.out + audit.err
    assert audit.out.startswith("18 finished epochs: each of 1,437 samples exactly once or dropped")


@pytest.mark.parametrize("parallel", ["ddp", "zero"])
def test_a_killed_rank_loses_little(parallel: str, tmp_path: Path, memory: Path, undisturbed: str) -> None:
    with started([*RESTARTED, f"parallel={parallel}"], tmp_path, env(memory)) as agent:
        wait_for(lambda: newest(memory) > 0, 60, "there is a snapshot")
        known = newest(memory)
        os.kill(ranks(memory)[1], signal.SIGKILL)
        out, err = agent.communicate(timeout=90)
    assert digest_in(Finished(agent.returncode, out, err)) == undisturbed
    (first, again) = starts(tmp_path)
    assert first == (0, None)
    assert again[0] >= known
    assert again[1] is not None
    assert Path(again[1]).is_relative_to(memory)
    assert_audit_is_clean(tmp_path)
    assert not list(memory.iterdir()), "nothing is left of a run that has finished"


@pytest.mark.slow
def test_a_killed_agent_loses_little_even_if_resumed_without_an_agent(
    tmp_path: Path, memory: Path, undisturbed: str
) -> None:
    with started(RESTARTED, tmp_path, env(memory)) as agent:
        wait_for(lambda: newest(memory) > 0, 60, "there is a snapshot")
        pids = ranks(memory).values()
        agent.kill()
        wait_for(lambda: not any(map(is_running, pids)), 5, "no rank is left")
    known = newest(memory)
    assert digest_in(run(TRAIN, tmp_path, env(memory))) == undisturbed
    assert [step for step, _ in starts(tmp_path)] == [0, known]
    assert_audit_is_clean(tmp_path)
    assert not own_folders(memory)


def test_a_run_that_is_stopped_leaves_nothing_in_memory(tmp_path: Path, memory: Path) -> None:
    with started(RESTARTED, tmp_path, env(memory)) as agent:
        wait_for(lambda: newest(memory) > 0, 60, "there is a snapshot")
        agent.send_signal(signal.SIGTERM)
        agent.communicate(timeout=60)
        assert agent.returncode == EXIT_STOPPED
    assert not list(memory.iterdir())


def test_too_little_memory_is_reported_and_the_disk_is_used(tmp_path: Path, memory: Path, undisturbed: str) -> None:
    with mounted(memory, "-t", "tmpfs", "-o", "size=560k", "none"):
        finished = run([*RESTARTED, "checkpoint.every=100"], tmp_path, env(memory))
        assert not list(memory.iterdir())
    assert digest_in(finished) == undisturbed
    (line,) = (line for line in finished.out.splitlines() if "snapshots" in line)
    assert re.search(
        r"no snapshots in memory; after a kill, the run continues from the last checkpoint on the disk: "
        r"\S+ has 0\.6 MB free, of which 0\.1 MB must stay free, and 0\.5 MB is needed for 2 of 0\.3 MB",
        line,
    )
    assert (tmp_path / "run" / "checkpoints" / "step-300").is_dir()


@pytest.mark.slow
def test_no_snapshot_is_taken_if_they_are_switched_off(tmp_path: Path, memory: Path, undisturbed: str) -> None:
    assert digest_in(run([*RESTARTED, "checkpoint.memory=false"], tmp_path, env(memory))) == undisturbed
    events = list(read_jsonl(tmp_path / "run" / "ranks" / "0.jsonl"))
    assert events
    assert not any(event.get("in_memory") for event in events)
