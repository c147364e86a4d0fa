"""PowerSGD on one process: what an approximation keeps, and what comes after it."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep.engine.channel import Channel
from lockstep.engine.powersgd import PowerSgd
from lockstep.engine.wire import Wire
from lockstep.world.world import World

SHAPE = (12, 4, 5)


@pytest.fixture
def wire() -> Iterator[Wire]:
    channel = Channel(World())
    yield Wire(channel, World())
    channel.close()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Setting:
    def __init__(self, wire: Wire, *shape: int, **settings: Any) -> None:
        self.method = PowerSgd(World(), 3, **{"start_after": 0, "min_compression_rate": 1.0} | settings)
        self.parameter = Parameter(torch.zeros(shape))
        self.method.add([self.parameter])
        self.wire = wire

    def average(self, gradient: Tensor) -> Tensor:
        flat = gradient.reshape(-1).clone()
        arrived = flat.view(gradient.shape)
        self.method.average(self.wire, flat, [self.parameter], [arrived])
        return arrived


def rank_of(arrived: Tensor) -> int:
    return int(torch.linalg.matrix_rank(arrived.reshape(len(arrived), -1)))


def test_what_has_few_dimensions_arrives_whole(wire: Wire) -> None:
    low = (drawn(12, 2) @ drawn(2, 20, seed=1)).view(SHAPE)
    torch.testing.assert_close(Setting(wire, *SHAPE, rank=2).average(low), low)


@pytest.mark.parametrize("rank", [1, 2])
def test_anything_else_arrives_with_as_many_dimensions_as_asked_for(wire: Wire, rank: int) -> None:
    assert rank_of(Setting(wire, *SHAPE, rank=rank).average(drawn(*SHAPE))) == rank


def test_what_is_left_out_is_remembered_from_the_first_pass_on(wire: Wire) -> None:
    setting = Setting(wire, *SHAPE)
    left_out = torch.zeros(SHAPE)
    for seed in range(3):
        gradient = drawn(*SHAPE, seed=seed)
        left_out = left_out + gradient - setting.average(gradient)
        error = setting.method.value({setting.parameter: "a"})["a"]["error"].local
        torch.testing.assert_close(error.view(SHAPE), left_out)


@pytest.mark.parametrize("feedback", [True, False])
def test_what_was_left_out_comes_later(wire: Wire, feedback: bool) -> None:
    setting = Setting(wire, *SHAPE, error_feedback=feedback)
    gradient = drawn(*SHAPE)
    mean = sum((setting.average(gradient) for _ in range(200)), torch.zeros(SHAPE)) / 200
    left_out = ((mean - gradient).norm() / gradient.norm()).item()
    assert left_out < 0.05 if feedback else left_out > 0.5


def test_a_warm_start_finds_the_best_approximation(wire: Wire) -> None:
    gradient = drawn(*SHAPE)
    values = torch.linalg.svdvals(gradient.view(12, -1))
    best = values[1:].norm().item()

    def left_out(passes: int, **settings: Any) -> float:
        setting = Setting(wire, *SHAPE, error_feedback=False, **settings)
        return [(setting.average(gradient) - gradient).norm().item() for _ in range(passes)][-1]

    assert left_out(50) == pytest.approx(best, rel=1e-3)
    assert left_out(50, warm_start=False) > 1.005 * best


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf])
def test_what_is_not_finite_is_passed_on_and_not_remembered(wire: Wire, spoilt: float) -> None:
    setting, same = Setting(wire, *SHAPE), Setting(wire, *SHAPE)
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
def test_what_is_not_compressed_arrives_as_it_is(wire: Wire, shape: tuple[int, ...], settings: dict[str, Any]) -> None:
    gradient = drawn(*shape)
    assert torch.equal(Setting(wire, *shape, **settings).average(gradient), gradient)


def test_it_starts_after_so_many_passes(wire: Wire) -> None:
    setting = Setting(wire, *SHAPE, start_after=2)
    gradient = drawn(*SHAPE)
    assert [torch.equal(setting.average(gradient), gradient) for _ in range(4)] == [True, True, False, False]


@pytest.mark.parametrize("settings", [{}, {"warm_start": False}, {"error_feedback": False}])
def test_it_goes_on_from_what_was_saved(wire: Wire, settings: dict[str, Any]) -> None:
    whole, later = Setting(wire, *SHAPE, **settings), Setting(wire, *SHAPE, **settings)
    gradients = [drawn(*SHAPE, seed=seed) for seed in range(6)]
    for gradient in gradients[:3]:
        whole.average(gradient)
    value = whole.method.value({whole.parameter: "a"})
    saved = {"a": copy.deepcopy({key: getattr(part, "local", part) for key, part in value["a"].items()})}
    arrived = [whole.average(gradient) for gradient in gradients[3:]]
    later.method.load(saved, {later.parameter: "a"})
    for gradient, expected in zip(gradients[3:], arrived, strict=True):
        assert torch.equal(later.average(gradient), expected)


def test_on_another_number_of_ranks_each_takes_the_mean_of_what_was_left_out() -> None:
    parameter = Parameter(torch.zeros(SHAPE))
    errors = drawn(3, 240)
    saved = {"a": {"number": 0, "passes": 7, "q": drawn(20, 1), "error": errors}}
    rows = []
    for world in (World(rank=1, size=3), World(rank=1, size=2)):
        method = PowerSgd(world, 3)
        method.load(saved, {parameter: "a"})
        shard = method.value({parameter: "a"})["a"]["error"]
        assert (shard.offsets, shard.shape) == ((1, 0), (world.size, 240))
        rows.append(shard.local[0])
    assert torch.equal(rows[0], errors[1])
    assert torch.equal(rows[1], errors.mean(0))


def test_other_settings_go_on_from_what_fits_them(wire: Wire) -> None:
    saved = {"a": {"number": 0, "passes": 7, "q": drawn(20, 1), "error": drawn(1, 240)}}
    gradient = drawn(*SHAPE, seed=2)
    setting = Setting(wire, *SHAPE, rank=2, error_feedback=False)
    setting.method.load(saved, {setting.parameter: "a"})
    arrived = setting.average(gradient)
    assert rank_of(arrived) == 2
    fresh = Setting(wire, *SHAPE, rank=2, error_feedback=False)
    fresh.method._memories[fresh.parameter].passes = 7
    assert torch.equal(fresh.average(gradient), arrived), "nothing is added any more"
