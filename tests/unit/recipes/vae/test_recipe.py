"""The vae recipe's parts put together: sizes from the data, loss and metrics as sums, mistakes in one line."""

from math import log
from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError, UserError
from lockstep.recipes.registry import load_recipe
from lockstep.recipes.vae import VaeConfig
from lockstep.recipes.vae.recipe import VaeRecipe


def made(*overrides: str) -> tuple[VaeRecipe, VaeConfig]:
    _, config = load_recipe("vae", ["model.width=4", *overrides])
    assert isinstance(config, VaeConfig)
    return VaeRecipe(config), config


def batch_of(recipe: VaeRecipe, config: VaeConfig, count: int) -> list[torch.Tensor]:
    return [recipe.data(config).test[:count][0]]  # type: ignore[index]


def test_the_default_is_digits_split_by_index_and_the_model_has_their_size() -> None:
    recipe, config = made()
    splits = recipe.data(config)
    assert (len(splits.train), len(splits.test)) == (1437, 360)  # type: ignore[arg-type]
    model: Any = recipe.model(config)
    assert model.shape == (1, 8, 8)


def test_the_loss_is_a_sum_over_images_with_beta_and_metrics_are_without() -> None:
    recipe, config = made("model.beta=3.0", "model.likelihood=gaussian", "model.beta_warmup=1000")
    model = recipe.model(config)
    batch = batch_of(recipe, config, 5)
    torch.manual_seed(1)
    output = model(*batch)
    torch.manual_seed(1)
    total, count = recipe.loss(model, batch)
    assert count == 5
    torch.testing.assert_close(total, output["reconstruction"].sum() + 3.0 * output["kl"].sum())

    torch.manual_seed(1)
    metrics: Any = recipe.metrics(model, batch)
    nats, reconstruction, kl = (metrics[name][0] for name in ("nats", "reconstruction", "kl"))
    torch.testing.assert_close(nats, reconstruction + kl)
    torch.testing.assert_close(reconstruction, output["reconstruction"].sum())
    bits, values = metrics["bits_per_value"]
    assert values == 5 * 64
    torch.testing.assert_close(bits, nats / log(2))


def test_bits_are_reported_only_where_stored_values_are_modelled() -> None:
    recipe, config = made("model.likelihood=bernoulli")
    assert "bits_per_value" not in recipe.metrics(recipe.model(config), batch_of(recipe, config, 2))


def test_sizes_that_do_not_fit_are_refused() -> None:
    recipe, config = made("model.image=[3, 32, 32]")
    with pytest.raises(UserError, match=r"model.image=3 × 32 × 32, but the images are 1 × 8 × 8: omit it"):
        recipe.data(config)
    recipe, config = made("model.image=[1, 7, 65]")
    with pytest.raises(UserError, match=r"images of 1 × 7 × 65: expected sides of 8 to 64 pixels"):
        recipe.model(config)
    with pytest.raises(ConfigError, match=r"model.likelihood: expected .*bernoulli"):
        made("model.likelihood=poisson")
    with pytest.raises(ConfigError, match=r"model.beta: expected a number of at least 0"):
        made("model.beta=-1.0")
