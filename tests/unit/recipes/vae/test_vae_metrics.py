"""The vae recipe's metrics: active units and likeness to real images; and how beta rises."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lockstep.metrics.aggregator import MetricAggregator
from lockstep.recipes.vae.recipe import BetaWarmup
from lockstep.recipes.vae.vae_metrics import ActiveUnits, compare_images
from lockstep.world.keyed_random import keyed_generator


def test_units_are_active_whose_means_differ_from_image_to_image() -> None:
    torch.manual_seed(0)
    means = torch.randn(90, 3) * torch.tensor([1.0, 0.05, 0.5]) + torch.tensor([0.0, 40.0, -3.0])
    for sizes in ([90], [1, 50, 39]):
        aggregator = MetricAggregator(torch.device("cpu"))
        for chunk, part in enumerate(means.split(sizes)):
            aggregator.add(chunk, {"active_units": ActiveUnits(part)})
        assert aggregator.results() == {"active_units": 2.0}


def real_images(seed: int, count: int) -> torch.Tensor:
    """Return images that are one grey value from 0 to 1 all over, a very regular data set."""
    return torch.rand(count, 1, 1, 1, generator=keyed_generator(seed, "greys")).expand(count, 1, 4, 4)


def test_likeness_tells_real_images_from_noise_and_from_too_few_kinds() -> None:
    train, test = real_images(0, 400), real_images(1, 200)
    found = compare_images(real_images(2, 200), train, test, keyed_generator(0, "noise"))
    assert found.drawn.precision > 0.9
    assert found.drawn.coverage == pytest.approx(found.real.coverage, abs=0.1)
    assert found.real.precision > 0.9
    assert found.noise.precision < 0.1  # the same values, at other places
    assert found.noise.coverage < 0.1

    dark_only = compare_images(real_images(2, 200) / 4, train, test, keyed_generator(0, "noise"))
    assert dark_only.drawn.precision > 0.9
    assert dark_only.drawn.coverage < 0.5 * dark_only.real.coverage
    nothing_like_it = compare_images(3 + real_images(2, 200), train, test, keyed_generator(0, "noise"))
    assert nothing_like_it.drawn == (0.0, 0.0)


def test_likeness_takes_as_many_drawn_images_as_there_are_test_images() -> None:
    """More draws would reach more balls, and look better than reality."""
    train, test = real_images(0, 400), real_images(1, 20)
    few, many = (compare_images(real_images(2, count), train, test, keyed_generator(0, "noise")) for count in (20, 300))
    assert few == many


def test_beta_rises_with_the_step_alone() -> None:
    warmup = BetaWarmup(beta=2.0, steps=3)
    assert [warmup.after(step) for step in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert warmup.beta == 2.0, "outside of a training, where it ends"
    trainer: Any = SimpleNamespace(step=1)
    warmup.on_start(trainer)
    assert warmup.beta == 1.0
    trainer.step = 2
    assert warmup.beta == 1.5
    assert warmup.state_dict() == {}


def test_without_a_warm_up_beta_is_constant() -> None:
    warmup = BetaWarmup(beta=0.7, steps=0)
    warmup.on_start(cast(Any, SimpleNamespace(step=0)))
    assert warmup.beta == 0.7
