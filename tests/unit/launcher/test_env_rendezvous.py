"""What `env://` means in a rank: the job's store for its own job, and torch's own handler for every other."""

import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.distributed import DistStoreError
from torch.distributed.rendezvous import rendezvous

from lockstep.config.placement import Placement
from lockstep.launcher import env_rendezvous
from lockstep.launcher.env_rendezvous import HANDLERS_TABLE, RENDEZVOUS_MODULE, join_through_job_store


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Placement:
    """A rank's placement, in its environment; torch's own handler is replaced by one that only says so."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4000"}.items():
        monkeypatch.setenv(name, value)

    def torchs_own(url: str, **_: Any) -> Iterator[tuple[Any, int, int]]:
        yield "torch's own", 0, 1

    monkeypatch.setattr(sys.modules[RENDEZVOUS_MODULE], HANDLERS_TABLE, {"env": torchs_own, "tcp": torchs_own})
    return Placement(master_port=4000, launcher="lockstep", store_file=str(tmp_path / "store"))


def joined(url: str = "env://", rank: int = -1, world_size: int = -1) -> Any:
    store, _, _ = next(rendezvous(url, rank, world_size, timeout=timedelta(seconds=0.1)))
    return store


def test_the_own_job_is_joined_through_its_store(place: Placement) -> None:
    join_through_job_store(place)
    for store in (joined(), joined(rank=0), joined(rank=0, world_size=1)):
        assert "PrefixStore" in repr(store)
    assert Path(place.store_file).exists()


@pytest.mark.parametrize(
    ("url", "rank", "world_size", "variables"),
    [
        ("env://", 0, 2, {}),
        ("env://", -1, -1, {"WORLD_SIZE": "2"}),
        ("env://", -1, -1, {"MASTER_PORT": "12355"}),
        ("tcp://127.0.0.1:4000", 0, 1, {}),
    ],
)
def test_any_other_job_is_joined_as_torch_would(
    place: Placement, monkeypatch: pytest.MonkeyPatch, url: str, rank: int, world_size: int, variables: dict[str, str]
) -> None:
    join_through_job_store(place)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert joined(url, rank, world_size) == "torch's own"


def test_a_rank_that_does_not_come_is_named_in_torchs_own_error(
    place: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    join_through_job_store(Placement(world_size=2, master_port=4000, store_file=place.store_file))
    with pytest.raises(DistStoreError, match="rank 0 timed out waiting for rank 1 of 2 to join the job"):
        joined()


def test_a_torch_without_the_table_joins_as_it_would(place: Placement, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules[RENDEZVOUS_MODULE], HANDLERS_TABLE)
    join_through_job_store(place)


def test_a_torch_that_is_imported_later_joins_through_the_store_too(
    place: Placement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_torch.py").write_text(f"{HANDLERS_TABLE} = {{'env': None}}\nis_whole = True")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(env_rendezvous, "RENDEZVOUS_MODULE", "late_torch")
    finders = list(sys.meta_path)
    join_through_job_store(place)
    module = __import__("late_torch")
    assert isinstance(module, ModuleType)
    assert module.is_whole
    assert getattr(module, HANDLERS_TABLE)["env"] is not None
    assert sys.meta_path == finders, "it looks for one module, once"
    del sys.modules["late_torch"]
