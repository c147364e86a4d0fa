"""The promise of `parallel=fsdp` and of meshes: each rank holds its part, and the result is that of one process.

Not to the bit: sums over ranks are added in another order. In double precision the differences are about 1e-16 per sum;
the tolerance is 1e-9, which a wrong factor or a missing part exceeds.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.testing import ranks
from lockstep.world.world import World
from tests.contracts.mesh_cases import MESHES, train_many
from tests.contracts.mesh_workloads import SMALL, Trained, train_gpt

PARTS = {"fsdp on 2": 2, "fsdp on 4, gathered once": 4, "fsdp, offloaded": 2, "hybrid": 2}  # of weights and optimizer


def close(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Tensor):
        return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-9, atol=1e-9, equal_nan=True)
    return bool(ours == pytest.approx(theirs, rel=1e-9, abs=1e-9))


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], but: str = "no such name") -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if but not in name and not close(ours[name], theirs[name])] == []


@pytest.fixture(scope="module")
def alone() -> dict[bool, Trained]:
    """Train on one process, with the output layer tied to the embedding and without."""
    return {tied: train_gpt(World(), tied=tied) for tied in (True, False)}


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_trains_as_one_process_does(name: str, alone: dict[bool, Trained]) -> None:
    num_ranks, options = MESHES[name]
    expected = alone[options.get("tied", True)]
    results = ranks(num_ranks).run(train_gpt, **options)
    assert {result.digest for result in results} == {results[0].digest}
    for result in results:
        assert close(result.losses, expected.losses)
        assert close(result.norms, expected.norms)
        if name in PARTS:
            for here, whole in zip(result.num_bytes, expected.num_bytes, strict=True):
                assert here == pytest.approx(whole / PARTS[name], rel=0.1)  # 22 rows on 4 ranks do not come out even
        for ours, theirs in zip(result.metrics, expected.metrics, strict=True):
            assert close(ours["loss"], theirs["loss"])
            assert ours["samples"][9][9] == 37
    assert results[0].metrics[0] == results[0].metrics[2] != results[0].metrics[1]  # the average, and back again
    assert_close(results[0].state, expected.state)


@pytest.mark.parametrize(("num_ranks", "parallel"), [(2, "fsdp"), (4, {"data": 2, "shard": 2})])
def test_models_of_many_kinds_train_as_on_one_process(num_ranks: int, parallel: Any) -> None:
    names = list(SMALL)
    options = {"parallel": parallel, "fsdp": {"min_parameters": 20}}
    results = ranks(num_ranks).run(train_many, names, **options)[0]
    for name, ours, theirs in zip(names, results, train_many(World(), names), strict=True):
        assert close(ours[0], theirs[0]), name
        # Batch norm's statistics are rank 0's, as under DistributedDataParallel.
        assert_close(ours[1], theirs[1], but="model/1." if name == "conv" else "no such name")


def test_a_run_resumes_under_any_other_strategy(tmp_path: Path) -> None:
    """One run, one step under each strategy; each starts with exactly the bits that the one before saved."""
    order: list[tuple[int, dict[str, Any]]] = [
        (1, {}),
        MESHES["fsdp on 2"],
        (2, {"parallel": "zero"}),
        MESHES["shard and tensor"],
        (2, {"parallel": "ddp"}),
        MESHES["hybrid"],
        MESHES["tensor"],
        MESHES["fsdp, offloaded"],
        (1, {"parallel": "single"}),
    ]
    steps, losses, digests = len(order), [], []
    for number, (num_ranks, options) in enumerate(order, start=1):
        stop = number if number < steps else None
        results = ranks(num_ranks).run(train_gpt, tmp_path / "run", stop, steps=steps, **options)
        assert {result.digest for result in results} == {results[0].digest}
        assert not digests or results[0].began_with == digests[-1], options
        digests.append(results[0].digest)
        losses += results[0].losses
    assert len(set(digests)) == steps, "every step changed the weights"
    whole = train_gpt(World(), steps=steps)
    assert close(losses, whole.losses)
    assert_close(results[0].state, whole.state)
