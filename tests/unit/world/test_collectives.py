"""Without a launcher, every collective works as in a world of one."""

import pytest
import torch

import lockstep


def test_rank_and_size() -> None:
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


def test_object_collectives() -> None:
    value = {"a": [1, 2.5, None, True, "é"], "t": torch.arange(3)}
    for copy in (
        lockstep.broadcast_object(value),
        lockstep.all_gather_object(value)[0],
        (lockstep.gather_object(value) or [])[0],
        lockstep.scatter_object([value]),
    ):
        assert copy["a"] == value["a"]
        assert torch.equal(copy["t"], value["t"])


def test_wrong_arguments_fail_in_one_process_as_on_many() -> None:
    with pytest.raises(lockstep.UserError, match="src=1"):
        lockstep.broadcast(torch.ones(1), src=1)
    with pytest.raises(lockstep.UserError, match="dst=1"):
        lockstep.gather(torch.ones(1), dst=1)
    with pytest.raises(lockstep.UserError, match="one part per process: expected 1, got 2"):
        lockstep.scatter(torch.empty(1), [torch.ones(1), torch.ones(1)])
    with pytest.raises(lockstep.UserError, match="op='median'"):
        lockstep.all_reduce(torch.ones(1), "median")  # type: ignore[arg-type]
    with pytest.raises(lockstep.UserError, match="truncated to integers"):
        lockstep.reduce_tensor(torch.ones(1, dtype=torch.int64))


def test_no_sync_of_a_plain_module() -> None:
    model = torch.nn.Linear(1, 1)
    with lockstep.no_sync(model):
        model(torch.ones(1)).backward()
    assert model.weight.grad is not None
