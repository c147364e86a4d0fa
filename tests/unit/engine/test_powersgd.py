"""PowerSGD on one process: the approximation, error feedback, warm start and saved state."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep.engine.comm_thread import CommThread
from lockstep.engine.compressed_all_reduce import CompressedAllReduce
from lockstep.engine.powersgd import PowerSgd
from lockstep.world.world import World

SHAPE = (12, 4, 5)


@pytest.fixture
def all_reduce() -> Iterator[CompressedAllReduce]:
    comm = CommThread(World())
    yield CompressedAllReduce(comm, World())
    comm.close()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Setting:
    def __init__(self, all_reduce: CompressedAllReduce, *shape: int, **settings: Any) -> None:
        self.method = PowerSgd(World(), 3, **{"start_after": 0, "min_compression_rate": 1.0} | settings)
        self.parameter = Parameter(torch.zeros(shape))
        self.method.add([self.parameter])
        self.all_reduce = all_reduce

    def average(self, gradient: Tensor) -> Tensor:
        flat = gradient.reshape(-1).clone()
        arrived = flat.view(gradient.shape)
        self.method.average(self.all_reduce, flat, [self.parameter], [arrived])
        return arrived


def rank_of(arrived: Tensor) -> int:
    return int(torch.linalg.matrix_rank(arrived.reshape(len(arrived), -1)))


def test_a_gradient_of_low_rank_arrives_unchanged(all_reduce: CompressedAllReduce) -> None:
    low = (drawn(12, 2) @ drawn(2, 20, seed=1)).view(SHAPE)
    torch.testing.assert_close(Setting(all_reduce, *SHAPE, rank=2).average(low), low)


@pytest.mark.parametrize("rank", [1, 2])
def test_any_other_gradient_arrives_with_the_rank_of_the_settings(all_reduce: CompressedAllReduce, rank: int) -> None:
    assert rank_of(Setting(all_reduce, *SHAPE, rank=rank).average(drawn(*SHAPE))) == rank


def test_the_error_is_kept_from_the_first_pass_on(all_reduce: CompressedAllReduce) -> None:
    setting = Setting(all_reduce, *SHAPE)
    left_out = torch.zeros(SHAPE)
    for seed in range(3):
        gradient = drawn(*SHAPE, seed=seed)
        left_out = left_out + gradient - setting.average(gradient)
        error = setting.method.state_dict({setting.parameter: "a"})["a"]["error"].local
        torch.testing.assert_close(error.view(SHAPE), left_out)


@pytest.mark.parametrize("feedback", [True, False])
def test_error_feedback_sends_the_error_later(all_reduce: CompressedAllReduce, feedback: bool) -> None:
    setting = Setting(all_reduce, *SHAPE, error_feedback=feedback)
    gradient = drawn(*SHAPE)
    mean = sum((setting.average(gradient) for _ in range(200)), torch.zeros(SHAPE)) / 200
    left_out = ((mean - gradient).norm() / gradient.norm()).item()
    assert left_out < 0.05 if feedback else left_out > 0.5


def test_a_warm_start_finds_the_best_approximation(all_reduce: CompressedAllReduce) -> None:
    gradient = drawn(*SHAPE)
    values = torch.linalg.svdvals(gradient.view(12, -1))
    best = values[1:].norm().item()

    def left_out(passes: int, **settings: Any) -> float:
        setting = Setting(all_reduce, *SHAPE, error_feedback=False, **settings)
        return [(setting.average(gradient) - gradient).norm().item() for _ in range(passes)][-1]

    assert left_out(50) == pytest.approx(best, rel=1e-3)
    assert left_out(50, warm_start=False) > 1.005 * best


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf])
def test_nonfinite_numbers_arrive_and_do_not_enter_the_state(all_reduce: CompressedAllReduce, spoilt: float) -> None:
    setting, same = Setting(all_reduce, *SHAPE), Setting(all_reduce, *SHAPE)
    gradient = drawn(*SHAPE)
    for each in (setting, same):
        each.average(gradient)
    bad = gradient.clone()
    bad[3, 1, 2] = spoilt
    assert not setting.average(bad).isfinite().all()
    assert torch.equal(setting.average(gradient), same.average(gradient))


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ((20,), {}),
        ((), {}),
        ((2, 2), {}),
        ((0, 4), {}),
        (SHAPE, {"min_compression_rate": 8.0}),
        (SHAPE, {"start_after": 1}),
    ],
)
def test_an_uncompressed_gradient_arrives_unchanged(
    all_reduce: CompressedAllReduce, shape: tuple[int, ...], settings: dict[str, Any]
) -> None:
    gradient = drawn(*shape)
    assert torch.equal(Setting(all_reduce, *shape, **settings).average(gradient), gradient)


def test_compression_starts_after_the_given_number_of_passes(all_reduce: CompressedAllReduce) -> None:
    setting = Setting(all_reduce, *SHAPE, start_after=2)
    gradient = drawn(*SHAPE)
    assert [torch.equal(setting.average(gradient), gradient) for _ in range(4)] == [True, True, False, False]


@pytest.mark.parametrize("settings", [{}, {"warm_start": False}, {"error_feedback": False}])
def test_a_restored_state_continues_with_the_same_bits(
    all_reduce: CompressedAllReduce, settings: dict[str, Any]
) -> None:
    whole, later = Setting(all_reduce, *SHAPE, **settings), Setting(all_reduce, *SHAPE, **settings)
    gradients = [drawn(*SHAPE, seed=seed) for seed in range(6)]
    for gradient in gradients[:3]:
        whole.average(gradient)
    value = whole.method.state_dict({whole.parameter: "a"})
    saved = {"a": copy.deepcopy({key: getattr(part, "local", part) for key, part in value["a"].items()})}
    arrived = [whole.average(gradient) for gradient in gradients[3:]]
    later.method.load_state_dict(saved, {later.parameter: "a"})
    for gradient, expected in zip(gradients[3:], arrived, strict=True):
        assert torch.equal(later.average(gradient), expected)


def test_on_another_number_of_ranks_each_takes_the_mean_error() -> None:
    parameter = Parameter(torch.zeros(SHAPE))
    errors = drawn(3, 240)
    saved = {"a": {"number": 0, "passes": 7, "q": drawn(20, 1), "error": errors}}
    rows = []
    for world in (World(rank=1, size=3), World(rank=1, size=2)):
        method = PowerSgd(world, 3)
        method.load_state_dict(saved, {parameter: "a"})
        shard = method.state_dict({parameter: "a"})["a"]["error"]
        assert (shard.offsets, shard.shape) == ((1, 0), (world.size, 240))
        rows.append(shard.local[0])
    assert torch.equal(rows[0], errors[1])
    assert torch.equal(rows[1], errors.mean(0))


def test_changed_settings_use_what_fits_of_a_saved_state(all_reduce: CompressedAllReduce) -> None:
    saved = {"a": {"number": 0, "passes": 7, "q": drawn(20, 1), "error": drawn(1, 240)}}
    gradient = drawn(*SHAPE, seed=2)
    setting = Setting(all_reduce, *SHAPE, rank=2, error_feedback=False)
    setting.method.load_state_dict(saved, {setting.parameter: "a"})
    arrived = setting.average(gradient)
    assert rank_of(arrived) == 2
    fresh = Setting(all_reduce, *SHAPE, rank=2, error_feedback=False)
    fresh.method._states[fresh.parameter].passes = 7
    assert torch.equal(fresh.average(gradient), arrived), "nothing is added any more"
