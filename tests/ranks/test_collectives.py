"""Collectives on real processes."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import lockstep
from lockstep.testing import RanksFailed, ranks
from lockstep.world.world import World


def use_every_collective(world: World) -> dict[str, object]:
    own = torch.tensor([float(world.rank)])
    scattered = torch.empty(1)
    parts = [torch.tensor([10.0 * rank]) for rank in range(world.size)] if world.rank == 1 else None
    gathered = lockstep.gather(own, dst=1)
    lockstep.barrier()
    return {
        "rank": (lockstep.get_rank(), world.rank),
        "size": (lockstep.get_world_size(), world.size),
        "main": lockstep.is_main_process(),
        "sum": lockstep.all_reduce(own.clone()).item(),
        "product": lockstep.all_reduce(own + 1, "product").item(),
        "max": lockstep.all_reduce(own.clone(), "max").item(),
        "mean": lockstep.reduce_tensor(own).item(),
        "own": own.item(),
        "all": [part.item() for part in lockstep.all_gather(own)],
        "gathered": None if gathered is None else [part.item() for part in gathered],
        "broadcast": lockstep.broadcast(own.clone(), src=1).item(),
        "scattered": lockstep.scatter(scattered, parts, src=1).item(),
    }


@pytest.mark.parametrize("size", [2, 3])
def test_every_collective(size: int) -> None:
    for rank, seen in enumerate(ranks(size).run(use_every_collective)):
        assert seen["rank"] == (rank, rank)
        assert seen["size"] == (size, size)
        assert seen["main"] is (rank == 0)
        assert seen["sum"] == size * (size - 1) / 2
        assert seen["product"] == {2: 2.0, 3: 6.0}[size]
        assert seen["max"] == size - 1
        assert seen["mean"] == (size - 1) / 2
        assert seen["own"] == rank, "reduce_tensor leaves its argument alone"
        assert seen["all"] == [float(other) for other in range(size)]
        assert seen["gathered"] == ([float(other) for other in range(size)] if rank == 1 else None)
        assert seen["broadcast"] == 1.0
        assert seen["scattered"] == 10.0 * rank


def exchange_objects(world: World) -> dict[str, object]:
    # Of a different size on each rank.
    own = {"rank": world.rank, "text": "x" * 10**world.rank, "tensor": torch.full((world.rank,), 1.5)}
    gathered = lockstep.gather_object(own, dst=1)
    return {
        "broadcast": lockstep.broadcast_object(own if world.rank == 1 else None, src=1),
        "all": lockstep.all_gather_object(own),
        "gathered": gathered,
        "scattered": lockstep.scatter_object([{"for": rank} for rank in range(world.size)], src=0)
        if world.rank == 0
        else lockstep.scatter_object(),
    }


def test_objects_of_different_sizes() -> None:
    for rank, seen in enumerate(ranks(3).run(exchange_objects)):
        assert seen["broadcast"]["rank"] == 1  # type: ignore[index]
        assert [value["rank"] for value in seen["all"]] == [0, 1, 2]  # type: ignore[attr-defined]
        assert [len(value["text"]) for value in seen["all"]] == [1, 10, 100]  # type: ignore[attr-defined]
        assert seen["all"][2]["tensor"].tolist() == [1.5, 1.5]  # type: ignore[index]
        assert (seen["gathered"] is None) == (rank != 1)
        assert seen["scattered"] == {"for": rank}


def send_too_much(world: World) -> None:
    lockstep.all_gather_object("x" * 1000 if world.rank == 1 else "", max_bytes=500)


def test_an_object_over_the_limit_is_refused_by_its_sender() -> None:
    with pytest.raises(RanksFailed, match="over the limit of 500"):
        ranks(2).run(send_too_much)


def accumulate_without_all_reduce(world: World) -> list[float]:
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    inputs = torch.tensor([world.rank + 1.0])
    with lockstep.no_sync(model):
        model(inputs).backward()
    before = model.module.weight.grad.item()
    model(inputs).backward()
    return [before, model.module.weight.grad.item()]


def test_no_sync_postpones_the_all_reduce() -> None:
    # At first each rank's own input; then the mean over ranks of all that was accumulated: (2 + 4) / 2.
    assert ranks(2).run(accumulate_without_all_reduce) == [[1.0, 3.0], [2.0, 3.0]]
