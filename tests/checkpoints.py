"""Saves checkpoints for tests with the real saver, on one process or on all ranks of a given world."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.checkpoint.async_saver import SaveContent, SaveOutcome, Saver
from lockstep.checkpoint.checkpoint_store import Retention
from lockstep.world.world import World

RUN_ID = "0123456789abcdef"
ALL = Retention(keep=100)
ALONE = World()


def save(folder: Path, step: int, parts: Mapping[str, Any], *facts: Mapping[str, Any], **options: Any) -> Path:
    """Save a checkpoint and return its folder; a failed save is an AssertionError."""
    outcome = try_to_save(folder, step, parts, *facts, **options)
    assert outcome.problem is None, outcome.problem
    return folder / f"step-{step}"


def try_to_save(
    folder: Path,
    step: int,
    parts: Mapping[str, Any],
    facts: Mapping[str, Any] | None = None,
    *,
    is_best: bool = False,
    retention: Retention = ALL,
    run_id: str = RUN_ID,
    world: World = ALONE,
) -> SaveOutcome:
    """Save a checkpoint and return the outcome."""
    saver = Saver(folder, world, run_id, attempt=1)
    saver.save(SaveContent(step, parts, facts or {}, is_best), retention)
    outcome = saver.wait()
    saver.close()
    assert outcome is not None
    return outcome
