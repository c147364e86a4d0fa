"""Un-launched, every primitive works as in a world of one."""

import pytest
import torch

import lockstep
from lockstep.errors import WorldError


def test_setup_without_a_launcher() -> None:
    world = lockstep.setup_distributed()
    rank, local_rank, world_size = world
    assert (rank, local_rank, world_size) == (0, 0, 1)
    assert world.is_main
    assert world.backend is None
    lockstep.cleanup_distributed()


def test_the_single_process_fallback_of_a_pipeline() -> None:
    assert lockstep.setup_distributed(rank=-1, world_size=1).size == 1
    assert lockstep.init_process_group("gloo", world_size=1, rank=0, timeout=5).size == 1


def test_rank_and_size_come_together() -> None:
    with pytest.raises(WorldError, match="give both"):
        lockstep.setup_distributed(rank=0)
    with pytest.raises(WorldError, match="timeout_s=0"):
        lockstep.setup_distributed(timeout_s=0)


def test_questions() -> None:
    assert lockstep.get_rank() == 0
    assert lockstep.get_world_size() == 1
    assert lockstep.is_main_process()
    lockstep.barrier()


def test_collectives() -> None:
    tensor = torch.tensor([1.0, 2.0])
    assert lockstep.all_reduce(tensor) is tensor
    assert lockstep.reduce_tensor(tensor).tolist() == [1.0, 2.0]
    assert [part.tolist() for part in lockstep.all_gather(tensor)] == [[1.0, 2.0]]
    gathered = lockstep.gather(tensor)
    assert gathered is not None
    assert gathered[0].tolist() == [1.0, 2.0]
    assert lockstep.broadcast(tensor) is tensor
    assert lockstep.scatter(torch.empty(1), [torch.tensor([7.0])]).item() == 7.0


def test_objects() -> None:
    value = {"a": [1, 2.5, None, True, "é"], "t": torch.arange(3)}
    for copy in (
        lockstep.broadcast_object(value),
        lockstep.all_gather_object(value)[0],
        (lockstep.gather_object(value) or [])[0],
        lockstep.scatter_object([value]),
    ):
        assert copy["a"] == value["a"]
        assert torch.equal(copy["t"], value["t"])


def test_wrong_arguments_fail_alone_as_they_would_in_company() -> None:
    with pytest.raises(ValueError, match="src=1"):
        lockstep.broadcast(torch.ones(1), src=1)
    with pytest.raises(ValueError, match="dst=1"):
        lockstep.gather(torch.ones(1), dst=1)
    with pytest.raises(ValueError, match="one part per process: 1, not 2"):
        lockstep.scatter(torch.empty(1), [torch.ones(1), torch.ones(1)])
    with pytest.raises(ValueError, match="op='median'"):
        lockstep.all_reduce(torch.ones(1), "median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="whole numbers"):
        lockstep.reduce_tensor(torch.ones(1, dtype=torch.int64))


def test_no_sync_of_a_plain_module() -> None:
    model = torch.nn.Linear(1, 1)
    with lockstep.no_sync(model):
        model(torch.ones(1)).backward()
    assert model.weight.grad is not None
