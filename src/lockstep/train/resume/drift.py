"""The fingerprint of a run: everything its bits depend on, and how it differs from a checkpoint's."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from torch import Tensor

from lockstep.config.duration import RunLength
from lockstep.data.loader_factory import Loader
from lockstep.data.sample_order import ORDER_VERSION
from lockstep.engine.lane_tree import TREE_VERSION
from lockstep.errors import EXIT_DRIFT, LockstepError
from lockstep.train.optim.lr_schedule import Schedule
from lockstep.train.step_options import StepOptions
from lockstep.train.train_state import TrainState
from lockstep.world.determinism import environment_fingerprint
from lockstep.world.world import World

COMPILED = "compiled"  # the entry that says that a model was compiled


class DriftError(LockstepError):
    """Continuing the run would change its result: something that its bits depend on differs from the checkpoint's."""

    exit_code = EXIT_DRIFT


def numerics_of(options: StepOptions, loader: Loader) -> dict[str, Any]:
    """Return the settings that a run keeps for life."""
    return options.numerics() | {
        "global_batch": loader.global_batch,
        "lanes": loader.lanes.count if loader.exact else None,
        "tail": loader.tail,
        "shuffle": loader.describe().get("shuffle"),
    }


def optimizer_settings(state: TrainState) -> dict[str, Any]:
    """Return the optimizers' settings, `{"optimizer.lr": 0.1, …}`, which a checkpoint would silently override."""
    return {
        f"{name}.{number}.{key}" if len(optimizer.param_groups) > 1 else f"{name}.{key}": _plain(value)
        for name, optimizer in state.optimizers.items()
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params"
    }


def fingerprint_of(
    world: World, options: StepOptions, loader: Loader, state: TrainState, schedules: Sequence[Any], length: RunLength
) -> dict[str, Any]:
    """Return everything that the bits depend on, including software and hardware, as plain values."""
    return (
        environment_fingerprint(world)
        | numerics_of(options, loader)
        | {
            "data_length": loader.describe().get("length"),
            "optimizers": [_name(optimizer) for optimizer in state.optimizers.values()],
            "schedules": [_describe(schedule, length) for schedule in schedules],
            "averages": [f"decay {a.decay}, warmup {a.warmup}" for a in state.averages.values()],
            "order_version": ORDER_VERSION,
            "tree_version": TREE_VERSION,
            COMPILED: state.any_compiled,
        }
    )


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line for each entry that differs, as in `threads: 1 → 4`; `compiling_changed` is not among them."""
    return [
        f"{name}: {before.get(name, '(absent)')} → {now.get(name, '(absent)')}"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name) and name != COMPILED
    ]


def compiling_changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return a sentence if one of the two was made with torch.compile and the other was not.

    Compiled and other kernels compute the same up to rounding, so this is no reason to refuse a resume.
    """
    if COMPILED not in before or before[COMPILED] == now[COMPILED]:  # earlier versions did not record it
        return None
    was, goes_on = ("without", "with it") if now[COMPILED] else ("with", "without")
    return (
        f"was saved {was} torch.compile, and the run continues {goes_on}: compiled kernels may round "
        "differently, so the last bits of the result may differ"
    )


def _plain(value: Any) -> Any:
    """Return numbers and text as they are, and for anything else its type: its text may differ in each process."""
    if isinstance(value, list | tuple):
        return [_plain(element) for element in value]
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    return value if isinstance(value, bool | int | str | None) else type(value).__name__


def _name(optimizer: Any) -> str:
    """Return an optimizer's class, and which of torch's implementations it uses."""
    chosen = [name for name in ("foreach", "fused", "capturable") if optimizer.defaults.get(name)]
    return " ".join([type(optimizer).__name__, *chosen])


def _describe(schedule: Any, length: RunLength) -> str:
    if not isinstance(schedule, Schedule):
        return "a function"
    return f"{schedule} to step {length.total_steps}" if schedule.ends_with_the_run else str(schedule)
