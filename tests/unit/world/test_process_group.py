"""Joining without a launcher, and leaving after an error."""

import pytest

import lockstep
from lockstep.errors import WorldError
from lockstep.world import process_group


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


def test_rank_and_size_must_be_given_together() -> None:
    with pytest.raises(WorldError, match="give both"):
        lockstep.setup_distributed(rank=0)
    with pytest.raises(WorldError, match="timeout_s=0"):
        lockstep.setup_distributed(timeout_s=0)


def test_an_error_of_cleanup_does_not_hide_the_error_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_contact() -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(process_group, "cleanup_distributed", lose_contact)
    with pytest.raises(ValueError, match="planted") as caught, process_group.leave_on_exit():
        raise ValueError("planted")
    assert caught.value.__context__ is None
    with pytest.raises(RuntimeError, match="closed by peer"), process_group.leave_on_exit():
        pass
