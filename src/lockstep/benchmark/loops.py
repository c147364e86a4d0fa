"""All loops by their names in the catalogue."""

from collections.abc import Callable

from lockstep.benchmark.catalogue import HAND_WRITTEN
from lockstep.benchmark.hand_written import as_fast_as_it_gets, with_dataloader
from lockstep.benchmark.loop import Loop, Setting
from lockstep.benchmark.with_accelerate import with_accelerate
from lockstep.benchmark.with_fabric import with_fabric
from lockstep.benchmark.with_lockstep import fast_mode, lockstep_mode

LOOPS: dict[str, Callable[[Setting], Loop]] = {
    HAND_WRITTEN: as_fast_as_it_gets,
    "dataloader": with_dataloader,
    "lockstep": lockstep_mode,
    "fast": fast_mode,
    "accelerate": with_accelerate,
    "fabric": with_fabric,
}
