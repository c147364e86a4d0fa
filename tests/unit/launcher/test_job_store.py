"""Ranks meet in a file: their keys are new each time they join, and missing ranks are named."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from lockstep.config.placement import Placement
from lockstep.errors import WorldError
from lockstep.launcher.job_store import meet_other_ranks


def places(folder: Path, world_size: int) -> list[Placement]:
    file = str(folder / "store")
    return [
        Placement(rank=rank, world_size=world_size, launcher="lockstep", store_is_hosted=True, store_file=file)
        for rank in range(world_size)
    ]


def test_ranks_meet_in_a_file_as_often_as_they_join(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            stores = list(pool.map(lambda place: meet_other_ranks(place, timedelta(seconds=20)), places(tmp_path, 2)))
            assert not stores[1].check(["key"]), "keys of an earlier group would be addresses that nothing listens at"
            stores[0].set("key", "here")
            assert stores[1].get("key") == b"here"
            del stores  # with a number of ranks, the last one would delete the file
    assert (tmp_path / "store").exists()


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    with pytest.raises(WorldError, match=r"^rank 0 timed out waiting for ranks 1, 2 of 3 to join the job$"):
        meet_other_ranks(places(tmp_path, 3)[0], timedelta(seconds=0.1))


def test_a_prefix_keeps_the_keys_apart(tmp_path: Path) -> None:
    one, other = (
        meet_other_ranks(
            Placement(store_file=str(tmp_path / "store"), store_prefix=prefix), timeout=timedelta(seconds=20)
        )
        for prefix in ("one", "other")
    )
    one.set("key", "here")
    assert not other.check(["key"])
