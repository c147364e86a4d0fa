"""The promise: the same bits of weights, buffers and optimizer state on any number of processes."""

import pytest

from tests.contracts.bit_cases import CASES, Case, assert_same, digests, digests_alone


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_any_number_of_processes_gives_the_same_bits(case: Case) -> None:
    alone = digests_alone(case)
    for num_ranks in (2, 3, 4):
        assert_same(digests(case, num_ranks), alone)


@pytest.mark.parametrize(("num_ranks", "shares"), [(2, [7, 1]), (3, [1, 1, 6]), (4, [1, 2, 4, 1])])
def test_unequal_shares_change_no_bit(num_ranks: int, shares: list[int]) -> None:
    for name in ("conv", "awkward"):
        case = CASES[name]
        assert_same(digests(case, num_ranks, lanes_per_rank=shares), digests_alone(case))


@pytest.mark.parametrize("bucket_mb", [1e-4, 1e-3, 100.0])
def test_buckets_of_any_size_change_no_bit(bucket_mb: float) -> None:
    case = CASES["gpt"]
    alone = digests_alone(case)
    for num_ranks in (2, 3):
        assert_same(digests(case._replace(options={"bucket_mb": bucket_mb}), num_ranks), alone)


def test_worker_processes_change_no_bit() -> None:
    case = CASES["mlp"]
    assert_same(digests(case, 2, workers=2), digests_alone(case))


def test_the_check_can_fail_stock_ddp_differs() -> None:
    case = CASES["mlp"]._replace(options={"determinism": "fast"})
    alone, together = digests_alone(case), digests(case, 2)
    assert together.digest != alone.digest
    assert together.losses == pytest.approx(alone.losses, rel=1e-4), "the same samples and the same normalisation"


def test_two_models_train_in_fast_mode_too() -> None:
    case = CASES["gan"]._replace(options={"determinism": "fast"})
    assert digests(case, 2).losses == pytest.approx(digests_alone(case).losses, rel=1e-2)


@pytest.mark.slow
def test_many_processes_of_any_number() -> None:
    for name in ("conv", "awkward"):
        alone = digests_alone(CASES[name])
        for num_ranks in (5, 6, 7, 8):
            assert_same(digests(CASES[name], num_ranks), alone)
