"""Would the answer change? What a run's bits hang on, and how that differs from what a checkpoint was made with."""

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.config.duration import RunLength
from lockstep.data.foreign import Loader
from lockstep.data.order import ORDER_VERSION
from lockstep.engine.tree import TREE_VERSION
from lockstep.errors import EXIT_DRIFT, LockstepError
from lockstep.train.options import StepOptions
from lockstep.train.parts import Parts
from lockstep.train.schedule import Schedule
from lockstep.world.fingerprint import fingerprint
from lockstep.world.world import World


class DriftError(LockstepError):
    """The run could go on, but not to the result that it would have had."""

    exit_code = EXIT_DRIFT


def numerics_of(options: StepOptions, loader: Loader) -> dict[str, Any]:
    """The settings that belong to a run for life."""
    return options.numerics() | {
        "global_batch": loader.global_batch,
        "lanes": loader.lanes.count if loader.exact else None,
        "tail": loader.tail,
    }


def fingerprint_of(
    world: World, options: StepOptions, loader: Loader, parts: Parts, schedules: Sequence[Any], length: RunLength
) -> dict[str, Any]:
    """Everything, also the software and the hardware; plain values."""
    return (
        fingerprint(world)
        | numerics_of(options, loader)
        | {
            "data_length": loader.facts().get("length"),
            "optimizers": [_name(optimizer) for optimizer in parts.optimizers.values()],
            "schedules": [_describe(schedule, length) for schedule in schedules],
            "averages": [f"decay {a.decay}, warmup {a.warmup}" for a in parts.averages.values()],
            "order_version": ORDER_VERSION,
            "tree_version": TREE_VERSION,
        }
    )


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line for each fact that differs, as in `threads: 1 → 4`."""
    return [
        f"{name}: {before.get(name, '(absent)')} → {now.get(name, '(absent)')}"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]


def _name(optimizer: Any) -> str:
    """Its class, and where it was told which of several implementations to use, that."""
    chosen = [name for name in ("foreach", "fused", "capturable") if optimizer.defaults.get(name)]
    return " ".join([type(optimizer).__name__, *chosen])


def _describe(schedule: Any, length: RunLength) -> str:
    if not isinstance(schedule, Schedule):
        return "a function"
    return f"{schedule} to step {length.total_steps}" if schedule.ends_with_the_run else str(schedule)
