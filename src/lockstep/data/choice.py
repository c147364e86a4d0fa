"""Which loader reads a data set: by samples, as a stream, or as a DataLoader of the user's does."""

from typing import Any

from torch.utils.data import DataLoader

from lockstep.data.cut import Tail
from lockstep.data.foreign import Loader, rebuild
from lockstep.data.iterable import IterableLaneLoader
from lockstep.data.loader import LaneLoader
from lockstep.data.samples import is_iterable
from lockstep.errors import UserError
from lockstep.world.world import World


def choose_loader(dataset: Any, world: World, *, global_batch: int | None, tail: Tail | None, **options: Any) -> Loader:
    """For `Run.loader`, which says what the options are."""
    if isinstance(dataset, DataLoader):
        for name in options.keys() - {"lanes", "seed", "lanes_per_rank", "uneven"}:
            raise UserError(
                f"run.loader(dataloader, …) has no option {name}: how samples are read is the DataLoader's to say"
            )
        return rebuild(dataset, world, global_batch=global_batch, tail=tail, **options)
    if global_batch is None:
        raise UserError("run.loader(…) needs global_batch=: the samples of one step, over all processes")
    if "uneven" in options:
        raise UserError(
            f"uneven={options['uneven']!r} is for a DataLoader with a sampler of its own: of a data set, every "
            "process gets its share, and tail= says what becomes of the rest"
        )
    kind = IterableLaneLoader if is_iterable(dataset) else LaneLoader
    return kind(dataset, global_batch, world, tail=tail or "drop", **options)
