"""Notice the torch schedulers of a script, whose state is in no checkpoint unless the script registers it."""

import gc
from collections.abc import Collection, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.errors import UserError
from lockstep.train.train_state import Resumable


def check_schedulers(
    optimizers: Collection[Optimizer], scheduled: Collection[Optimizer], registered: Collection[Resumable]
) -> str | None:
    """Raise if a torch scheduler's state is in no checkpoint, because it would start over after a resume.

    Args:
        optimizers: the run's.
        scheduled: those with a schedule of lockstep's own.
        registered: what the script has registered to be saved.

    Returns a warning, if it is not certain: what is registered may hold the state in a form of its own.
    """
    found = _schedulers_of(optimizers)
    if not found:
        return None
    saved = [each.state_dict() for each in registered]
    schedulers = [
        each
        for each in found
        if not any(each is other for other in registered)
        and not any(_holds(state, each.state_dict()) for state in saved)
    ]
    if not schedulers:
        return None
    name, optimizer = type(schedulers[0]).__name__, schedulers[0].optimizer
    if any(optimizer is each for each in scheduled):
        raise UserError(
            f"{name} and run.optimizer(…, schedule=…) would both set the learning rate of {type(optimizer).__name__}: "
            "omit one"
        )
    problem = (
        f'no checkpoint would hold the state of {name}: call run.register_state("scheduler", scheduler) before '
        "run.steps(…), or give run.optimizer(…, schedule=lockstep.Schedule.cosine(…)) instead"
    )
    if not registered:
        raise UserError(problem)
    return problem


def _holds(saved: Any, state: Mapping[str, Any]) -> bool:
    """Return whether a scheduler's state is among saved values, as in `SequentialLR` the states of its parts are."""
    values = saved.values() if isinstance(saved, Mapping) else saved if isinstance(saved, list | tuple) else ()
    return any((isinstance(each, Mapping) and each == state) or _holds(each, state) for each in values)


def _schedulers_of(optimizers: Collection[Optimizer]) -> list[LRScheduler]:
    """Return the torch schedulers that exist for these optimizers, which do not refer to them."""
    found = _find_schedulers(optimizers)
    if found:
        gc.collect()  # some may be left over from before
        found = _find_schedulers(optimizers)
    return found


def _find_schedulers(optimizers: Collection[Optimizer]) -> list[LRScheduler]:
    kinds = {LRScheduler}
    while new := {sub for kind in kinds for sub in kind.__subclasses__()} - kinds:
        kinds |= new
    schedulers: list[LRScheduler] = [each for each in gc.get_objects() if type(each) in kinds]
    return [each for each in schedulers if any(getattr(each, "optimizer", None) is own for own in optimizers)]
