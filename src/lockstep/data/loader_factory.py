"""Choose the loader of a data set: by index, as a stream, or from a torch DataLoader, which is rebuilt if possible."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from lockstep.data.distributed_dataloaders import DistributedSampler
from lockstep.data.iterable_loader import IterableLaneLoader
from lockstep.data.lane_loader import LaneLoader
from lockstep.data.lanes import Tail
from lockstep.data.sample_source import Collate, custom_collate, is_iterable
from lockstep.data.sample_workers import WorkerInit
from lockstep.data.torch_loader import TorchLoader, Uneven
from lockstep.errors import UserError
from lockstep.world.world import World

Loader = LaneLoader | IterableLaneLoader | TorchLoader


def choose_loader(
    dataset: Any,
    world: World,
    *,
    seed: int,
    global_batch: int | None = None,
    lanes: int | Literal["auto"] = "auto",
    lanes_per_rank: Sequence[int] | None = None,
    shuffle: bool | None = None,
    tail: Tail | None = None,
    workers: int | None = None,
    prefetch: int | None = None,
    collate: Collate | None = None,
    worker_init: WorkerInit | None = None,
    uneven: Uneven | None = None,
) -> Loader:
    """The loader for a map-style data set, an iterable one, or a torch DataLoader; used by `Run.loader`.

    None means that an option is not given. An option that the kind of data set does not have is an error.

    Args:
        dataset: the data set, or a DataLoader; see `rebuild` for how a DataLoader is handled.
        world: this process's place in the job.
        seed: decides the order of the samples and the random numbers that the data set draws.
        global_batch: the number of samples of one step, over all processes. A DataLoader has its own batch size.
        lanes: the number of lanes, a power of two that divides `global_batch`; "auto" is at most 8.
        lanes_per_rank: how many lanes each rank runs, for devices of different speeds; evenly split if not given.
        shuffle: shuffle each epoch (the default); of map-style data sets only.
        tail: what happens to the samples left over at an epoch's end: "drop" (the default), "short" or "pad".
        workers: the number of worker processes that fetch samples; by default 0, which means this process.
        prefetch: how many global batches the workers fetch ahead; by default 2.
        collate: turns a list of samples into a lane's data; torch's default if not given.
        worker_init: called first in each worker process, with its number.
        uneven: for a DataLoader that is used in its own order: "cut" (the default) or "join"; see `TorchLoader`.
    """
    if isinstance(dataset, DataLoader):
        reading_options = {
            "shuffle": shuffle,
            "workers": workers,
            "prefetch": prefetch,
            "collate": collate,
            "worker_init": worker_init,
        }
        for name, value in reading_options.items():
            if value is not None:
                raise UserError(f"run.loader(dataloader, …) has no option {name}: set it in the DataLoader instead")
        return rebuild(
            dataset,
            world,
            seed=seed,
            global_batch=global_batch,
            lanes=lanes,
            tail=tail,
            lanes_per_rank=lanes_per_rank,
            uneven="cut" if uneven is None else uneven,
        )
    if global_batch is None:
        raise UserError("run.loader(…) needs global_batch=: the number of samples of one step, over all processes")
    if uneven is not None:
        raise UserError(
            f"uneven={uneven!r} is only for a DataLoader with its own sampler: lockstep splits a data set over the "
            "processes itself, so omit uneven= (tail= says what to do with the samples left over)"
        )
    tail = "drop" if tail is None else tail
    workers = 0 if workers is None else workers
    prefetch = 2 if prefetch is None else prefetch
    if is_iterable(dataset):
        if shuffle is not None:
            raise UserError(f"shuffle={shuffle}: an iterable data set decides its own order; omit shuffle=")
        return IterableLaneLoader(
            dataset,
            global_batch,
            world,
            lanes=lanes,
            seed=seed,
            tail=tail,
            lanes_per_rank=lanes_per_rank,
            workers=workers,
            prefetch=prefetch,
            collate=collate,
            worker_init=worker_init,
        )
    return LaneLoader(
        dataset,
        global_batch,
        world,
        lanes=lanes,
        seed=seed,
        tail=tail,
        shuffle=True if shuffle is None else shuffle,
        lanes_per_rank=lanes_per_rank,
        workers=workers,
        prefetch=prefetch,
        collate=collate,
        worker_init=worker_init,
    )


def require_loader(call: str, given: Any) -> Loader:
    """Return what a script gave to this call, if it is a loader."""
    if not hasattr(given, "batches"):
        raise UserError(
            f"{call}({type(given).__name__}, …): make the loader with run.loader(dataset, global_batch=…), or pass a "
            "torch DataLoader"
        )
    return cast(Loader, given)


def rebuild(
    loader: DataLoader[Any],
    world: World,
    *,
    seed: int,
    global_batch: int | None = None,
    lanes: int | Literal["auto"] = "auto",
    tail: Tail | None = None,
    lanes_per_rank: Sequence[int] | None = None,
    uneven: Uneven = "cut",
) -> Loader:
    """A DataLoader as a lane loader with the same data set, collate function, workers and tail.

    Its batch size is the global batch, or with a distributed sampler that of each replica. A DataLoader with a sampler
    or batch sampler that lockstep does not know is used in its own order, by a `TorchLoader`.

    Args:
        loader: the DataLoader.
        world: this process's place in the job.
        seed: decides the order of the samples and the random numbers that the data set draws.
        global_batch: replaces the DataLoader's batch size.
        lanes: the number of lanes, or "auto".
        tail: replaces the DataLoader's `drop_last`, which means "drop" or "short".
        lanes_per_rank: how many lanes each rank runs; evenly split if omitted.
        uneven: for a `TorchLoader`, whose ranks may have different numbers of batches.
    """
    if uneven not in get_args(Uneven):
        raise UserError(f"uneven={uneven!r}: expected {' or '.join(get_args(Uneven))}")
    tail = ("drop" if loader.drop_last else "short") if tail is None else tail
    collate, batch_size = custom_collate(loader), loader.batch_size
    if isinstance(loader.dataset, IterableDataset) and batch_size is not None:
        return IterableLaneLoader(
            loader.dataset,
            batch_size if global_batch is None else global_batch,
            world,
            lanes=lanes,
            seed=seed,
            tail=tail,
            workers=loader.num_workers,
            collate=collate,
            lanes_per_rank=lanes_per_rank,
            worker_init=loader.worker_init_fn,
        )
    sampling = _known_sampling(loader)
    if sampling is None or batch_size is None:
        return TorchLoader(loader, world, uneven=uneven)
    return LaneLoader(
        loader.dataset,
        batch_size * sampling.num_replicas if global_batch is None else global_batch,
        world,
        lanes=lanes,
        seed=seed,
        tail=tail,
        shuffle=sampling.shuffle,
        workers=loader.num_workers,
        collate=collate,
        lanes_per_rank=lanes_per_rank,
        worker_init=loader.worker_init_fn,
    )


class _Sampling(NamedTuple):
    """How a DataLoader goes through its data set, if a lane loader can do the same."""

    shuffle: bool
    num_replicas: int = 1  # over which its sampler splits; the batch size is then that of each replica


def _known_sampling(loader: DataLoader[Any]) -> _Sampling | None:
    """How the DataLoader samples; None if a lane loader cannot do the same."""
    # Exact types: a subclass may do anything.
    if type(loader.batch_sampler) is not BatchSampler:
        return None
    dataset: Any = loader.dataset
    match sampler := loader.sampler:
        case RandomSampler() if type(sampler) is RandomSampler and sampler.data_source is dataset:
            is_permutation = not sampler.replacement and sampler.num_samples == len(dataset)
            return _Sampling(shuffle=True) if is_permutation else None
        case SequentialSampler() if type(sampler) is SequentialSampler and sampler.data_source is dataset:
            return _Sampling(shuffle=False)
        case TorchDistributedSampler() if type(sampler) in (TorchDistributedSampler, DistributedSampler):
            return _Sampling(sampler.shuffle, sampler.num_replicas) if sampler.dataset is dataset else None
    return None
