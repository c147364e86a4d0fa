"""Private names of torch, numpy, Python and torchmetrics that data loading, metrics and seeding use.

Each was last seen in the version below. If a test fails after an upgrade, look for the name's successor, adapt the one
place that uses it, and note the new version there and here. `test_without_…` shows what happens until then.
"""

import random
import sys
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch.utils.data import DataLoader, get_worker_info

from lockstep.data import sample_workers
from lockstep.data.iterable_loader import IterableLaneLoader
from lockstep.errors import LockstepError, UserError
from lockstep.metrics import TorchMetric, torchmetrics_adapter
from lockstep.testing import ranks
from lockstep.world import dtensor, keyed_random
from lockstep.world.world import World
from tests.unit.data.datasets import Lines

SEEN_IN = {"torch": "2.13", "numpy": "2.4", "torchmetrics": "1.9", "python": "3.11 and 3.12"}


def missing(name: str, package: str, used_by: str) -> str:
    installed = sys.version.split()[0] if package == "python" else version(package)
    return f"{package} {installed} has no {name}, last seen in {package} {SEEN_IN[package]}: adapt {used_by}"


def test_random_inst() -> None:
    generator = getattr(random, "_inst", None)
    assert isinstance(generator, random.Random), missing("random._inst", "python", "world/keyed_random.py")
    assert hasattr(generator, "gauss_next"), missing("Random.gauss_next", "python", "world/keyed_random.py")
    assert keyed_random._seed_python is not random.seed


def test_numpy_rand() -> None:
    found = hasattr(np.random.mtrand, "_rand")
    assert found, missing("numpy.random.mtrand._rand", "numpy", "world/keyed_random.py")
    assert keyed_random._seed_numpy is not np.random.seed


def test_without_the_generators_seeding_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn() -> list[float]:
        keyed_random.seed_cpu_rngs(2**40 + 7)
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]

    with keyed_random.preserve_rng_states():
        expected = drawn()
        with pytest.MonkeyPatch.context() as names:
            names.delattr(random, "_inst")
            names.delattr(np.random.mtrand, "_rand")
            seed_numpy, seed_python = keyed_random._find_numpy_seed(), keyed_random._find_python_seed()
        assert (seed_numpy, seed_python) == (np.random.seed, random.seed)
        monkeypatch.setattr(keyed_random, "_seed_numpy", seed_numpy)
        monkeypatch.setattr(keyed_random, "_seed_python", seed_python)
        assert drawn() == expected


def test_dtensor_offsets() -> None:
    try:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: F401
    except ImportError:
        name = "torch.distributed.tensor._utils.compute_local_shape_and_global_offset"
        pytest.fail(missing(name, "torch", "world/dtensor.py"))


def compare_offsets(world: World) -> int:
    """Compare this rank's slices, by torch's private function and by public names; return how many were compared."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    compared = 0
    for mesh in (init_device_mesh("cpu", (world.size,)), init_device_mesh("cpu", (2, world.size // 2))):
        kinds: list[Any] = [Replicate(), Shard(0), Shard(1)]
        layouts = [[a] for a in kinds] if mesh.ndim == 1 else [[a, b] for a in kinds for b in kinds]
        for placements in layouts:
            for shape in [(8, 4), (7, 5), (1, 3), (2, 0)]:
                sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
                own_sizes, own_offsets = dtensor.chunk_sizes_and_offsets(shape, mesh, placements)
                assert tuple(own_sizes) == tuple(sizes), (placements, shape)
                if all(sizes):  # where an empty slice begins does not matter
                    assert tuple(own_offsets) == tuple(offsets), (placements, shape)
                compared += 1
    return compared


def test_without_dtensor_offsets_plain_shards_are_found_by_public_names() -> None:
    assert ranks(4).run(compare_offsets) == [48] * 4


def test_without_dtensor_offsets_strided_shards_are_refused() -> None:
    class StridedShard:
        dim = 0

        def is_replicate(self) -> bool:
            return False

    with pytest.raises(LockstepError, match=r"cannot be saved with torch .*: use torch 2\.11 or 2\.13"):
        dtensor.chunk_sizes_and_offsets((4,), None, [StridedShard()])


def test_dataloader_iterator() -> None:
    iterator: Any = iter(DataLoader([0, 1], num_workers=1, generator=torch.Generator()))
    try:
        for name in ("_workers", "_shutdown_workers"):
            assert hasattr(iterator, name), missing(f"DataLoader iterator.{name}", "torch", "data/sample_workers.py")
        (worker,) = sample_workers.worker_processes(iterator)
        assert worker.is_alive()
    finally:
        sample_workers.shut_down_workers(iterator)
    assert not worker.is_alive()


def test_without_the_dataloaders_iterator_nothing_is_shut_down() -> None:
    assert sample_workers.worker_processes(object()) == []
    sample_workers.shut_down_workers(object())


class SeesWorkers(Lines):
    """Every sample is 1.0 if the data set sees torch's worker info, else 0.0."""

    def lane(self, lane: int, num_lanes: int, epoch: int) -> Any:
        while True:
            yield float(get_worker_info() is not None)


def test_worker_info() -> None:
    import torch.utils.data._utils.worker as torch_worker

    found = hasattr(torch_worker, "_worker_info")
    assert found, missing("torch.utils.data._utils.worker._worker_info", "torch", "data/sample_workers.py")
    (batch,) = IterableLaneLoader(SeesWorkers(), 4, World(), lanes=1, workers=1).batches(0, 1)
    assert batch.lanes[0].data.tolist() == [0.0] * 4


def test_without_worker_info_workers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_workers, "get_worker_info", lambda: "cannot be hidden")
    with pytest.raises(UserError, match=r"with torch .*: use workers=0, or torch 2\.11 or 2\.13"):
        sample_workers.hide_worker_info()


@pytest.mark.parametrize("name", torchmetrics_adapter.PRIVATE_METRIC_NAMES)
def test_torchmetrics_metric(name: str) -> None:
    metric = torchmetrics.MeanMetric()
    assert hasattr(metric, name), missing(f"Metric.{name}", "torchmetrics", "metrics/torchmetrics_adapter.py")


@pytest.mark.parametrize("name", torchmetrics_adapter.PRIVATE_COLLECTION_NAMES)
def test_torchmetrics_collection(name: str) -> None:
    collection = torchmetrics.MetricCollection([torchmetrics.MeanMetric()])
    used_by = "metrics/torchmetrics_adapter.py"
    assert hasattr(collection, name), missing(f"MetricCollection.{name}", "torchmetrics", used_by)


def test_without_torchmetrics_names_the_metric_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    metric = torchmetrics.MeanMetric()
    monkeypatch.setattr(torchmetrics_adapter, "PRIVATE_METRIC_NAMES", ("_gone",))
    installed = version("torchmetrics")
    with pytest.raises(UserError, match=f"does not work with torchmetrics {installed}, which has no _gone: install"):
        TorchMetric(metric, 1.0)
