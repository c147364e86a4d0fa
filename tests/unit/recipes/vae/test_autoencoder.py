"""The vae recipe's model: shapes, the cost of an image and its code, what is drawn."""

from math import log

import pytest
import torch
from torch.distributions import Bernoulli as TorchBernoulli
from torch.distributions import Normal, kl_divergence

from lockstep.recipes.vae import autoencoder
from lockstep.recipes.vae.autoencoder import Autoencoder, Bernoulli, Gaussian, ImageShape, Posterior
from lockstep.world.keyed_random import keyed_generator

DIGIT = ImageShape(1, 8, 8)


def small_model(shape: ImageShape = DIGIT, beta: float = 1.0) -> Autoencoder:
    torch.manual_seed(0)
    return Autoencoder(shape, latent=3, width=4, likelihood="gaussian", beta=beta)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 15), (1, 28, 28), (3, 32, 20), (3, 64, 64)])
def test_images_of_any_size_come_back_in_that_size(shape: tuple[int, int, int]) -> None:
    model = small_model(ImageShape(*shape))
    images = torch.rand(2, *shape)
    assert model.encode(images).mean.shape == (2, 3)
    drawn = model.draw(5, keyed_generator(0, "drawn"))
    assert drawn.shape == (5, *shape)
    assert 0 <= drawn.min() <= drawn.max() <= 1


def test_the_output_carries_the_loss_and_what_it_is_made_of() -> None:
    model = small_model(beta=0.25)
    output = model(torch.rand(6, 1, 8, 8), torch.arange(6))
    assert (output["reconstruction"].shape, output["kl"].shape) == ((6,), (6, 3))
    torch.testing.assert_close(output["loss"], (output["reconstruction"] + 0.25 * output["kl"].sum(1)).mean())
    assert not any(each._is_view() for each in output.values()), "FSDP warns of those"
    output["loss"].backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_bytes_and_floats_are_the_same_images() -> None:
    model = small_model()
    pixels = torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8)
    outputs = []
    for images in (pixels, pixels.float() / 255):
        torch.manual_seed(3)
        outputs.append(model(images)["loss"])
    assert outputs[0] == outputs[1]


def test_no_image_affects_another() -> None:
    model = small_model()
    images = torch.rand(3, 1, 8, 8)
    alone = torch.cat([model.encode(image[None]).mean for image in images])
    torch.testing.assert_close(model.encode(images).mean, alone)


def test_a_code_is_drawn_around_its_mean_and_costs_what_its_distribution_does() -> None:
    posterior = Posterior(torch.tensor([[0.0, 2.0]]), torch.tensor([[0.0, -2.0]]))
    expected = kl_divergence(Normal(posterior.mean, (0.5 * posterior.log_variance).exp()), Normal(0.0, 1.0))
    torch.testing.assert_close(posterior.kl(), expected)
    torch.manual_seed(0)
    many = Posterior(*(part.expand(20_000, 2) for part in posterior)).draw()
    torch.testing.assert_close(many.mean(0), posterior.mean[0], atol=0.03, rtol=0)
    torch.testing.assert_close(many.var(0), posterior.log_variance[0].exp(), atol=0.03, rtol=0)


def test_ink_costs_its_cross_entropy() -> None:
    scores = torch.randn(2, 1, 8, 8)
    ink = (torch.rand(2, 1, 8, 8) > 0.5).float()
    expected = -TorchBernoulli(logits=scores).log_prob(ink).flatten(1).sum(1)
    torch.testing.assert_close(Bernoulli().nats(scores, ink), expected)


def test_a_bell_curves_nats_bound_what_256_levels_cost() -> None:
    """The mean over many draws is at least the cost of the level itself, and near to it where the curve is wide."""
    likelihood = Gaussian(1)
    with torch.no_grad():
        likelihood.log_spread.fill_(log(0.05))
    level = 100
    image = torch.full((20_000, 1, 1, 1), level / 255)
    decoded = torch.full_like(image, 0.45).logit()
    torch.manual_seed(0)
    bound = likelihood.nats(decoded, image).mean().item()
    curve = Normal(torch.tensor(0.45, dtype=torch.float64), torch.tensor(0.05, dtype=torch.float64))
    edges = torch.tensor([level, level + 1], dtype=torch.float64) / 256
    exact = -curve.cdf(edges).diff().log().item()
    assert exact - 0.002 < bound < exact + 0.01


@torch.no_grad()
def test_new_images_are_keyed_and_leave_the_global_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    before = torch.get_rng_state()
    first, again, other = (model.draw(7, keyed_generator(seed, "samples")) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())
    monkeypatch.setattr(autoencoder, "_DECODE_BATCH", 3)
    torch.testing.assert_close(model.draw(7, keyed_generator(1, "samples")), first)
