"""The promise: the same bits of weights, buffers and optimizer state on any number of processes."""

from typing import Any, NamedTuple

import pytest

from lockstep.testing import ranks
from tests.contracts.workloads import WORKLOADS, Trained, train


class Case(NamedTuple):
    name: str
    loader: dict[str, Any]
    options: dict[str, Any] = {}  # noqa: RUF012
    steps: int = 5


# Not a power of two: dividing by one is exact in any precision, and would hide mistakes.
LOADER = {"global_batch": 40, "lanes": 8}

RULES = {"average": "mean", "newest": "first", "high*": "max"}

CASES = {
    **{name: Case(name, LOADER) for name in WORKLOADS},
    "remembering": Case("remembering", LOADER, {"buffers": RULES}),
    # Its fourth step is the one with empty lanes, and the last, so that what it leaves is what is compared.
    "remembering with empty lanes": Case(
        "remembering", {"global_batch": 48, "lanes": 8, "tail": "short"}, {"buffers": RULES}, steps=4
    ),
    "clipped": Case("gpt", LOADER, {"clip_norm": 0.05}),
    "clipped gan": Case("gan", LOADER, {"clip_norm": 0.01}),
    "as many lanes as processes": Case("conv", {"global_batch": 36, "lanes": 4}),
    "sixteen lanes": Case("mlp", {"global_batch": 48, "lanes": 16}),
    # 150 samples in batches of 64: the third batch of an epoch has 22, its lanes 2 or 3.
    "a short last batch": Case("conv", {"global_batch": 64, "lanes": 8, "tail": "short"}),
    # 150 in batches of 48: 6 left over for 8 lanes, so that two are empty. Of 146, 2: whole ranks have no sample.
    "empty lanes": Case("conv", {"global_batch": 48, "lanes": 8, "tail": "short"}),
    "empty lanes and two terms": Case("terms", {"global_batch": 48, "lanes": 8, "tail": "short"}),
    "empty lanes and unused parameters": Case("awkward", {"global_batch": 48, "lanes": 8, "tail": "short"}),
    # Lanes of two rows: some have no valid target.
    "lanes without a target": Case("gpt", {"global_batch": 16, "lanes": 8}),
}


def digests(case: Case, num_ranks: int, **more: Any) -> Trained:
    results = ranks(num_ranks).run(train, case.name, case.steps, case.loader | more, **case.options)
    assert all(result == results[0] for result in results), "ranks differ among themselves"
    return results[0]


def assert_same(result: Trained, alone: Trained) -> None:
    differing = [name for name in alone.tensors if result.tensors.get(name) != alone.tensors[name]]
    assert not differing
    assert result == alone


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_any_number_of_processes_gives_the_same_bits(case: Case) -> None:
    alone = digests(case, 1)
    for num_ranks in (2, 3, 4):
        assert_same(digests(case, num_ranks), alone)


@pytest.mark.parametrize(("num_ranks", "shares"), [(2, [7, 1]), (3, [1, 1, 6]), (4, [1, 2, 4, 1])])
def test_unequal_shares_change_no_bit(num_ranks: int, shares: list[int]) -> None:
    for name in ("conv", "awkward"):
        case = CASES[name]
        assert_same(digests(case, num_ranks, lanes_per_rank=shares), digests(case, 1))


@pytest.mark.parametrize("bucket_mb", [1e-4, 1e-3, 100.0])
def test_buckets_of_any_size_change_no_bit(bucket_mb: float) -> None:
    case = CASES["gpt"]
    alone = digests(case, 1)
    for num_ranks in (2, 3):
        assert_same(digests(case._replace(options={"bucket_mb": bucket_mb}), num_ranks), alone)


def test_worker_processes_change_no_bit() -> None:
    case = CASES["mlp"]
    assert_same(digests(case, 2, workers=2), digests(case, 1))


def test_the_check_can_fail_stock_ddp_differs() -> None:
    case = CASES["mlp"]._replace(options={"determinism": "fast"})
    alone, together = digests(case, 1), digests(case, 2)
    assert together.digest != alone.digest
    assert together.losses == pytest.approx(alone.losses, rel=1e-4), "the same samples and the same normalisation"


def test_two_models_train_in_fast_mode_too() -> None:
    case = CASES["gan"]._replace(options={"determinism": "fast"})
    assert digests(case, 2).losses == pytest.approx(digests(case, 1).losses, rel=1e-2)


@pytest.mark.slow
def test_many_processes_of_any_number() -> None:
    for name in ("conv", "awkward"):
        alone = digests(CASES[name], 1)
        for num_ranks in (5, 6, 7, 8):
            assert_same(digests(CASES[name], num_ranks), alone)
