"""Attacks of the ebm recipe: they increase their objective, stay within bounds, and leave the model alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.recipes.ebm.attack import GradientAscent, disguise, mislead
from lockstep.recipes.ebm.energy_network import Classifier, log_density

CLIMB = GradientAscent(radius=0.7, rate=0.2, steps=8)


def some_images(count: int = 6) -> Tensor:
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model() -> Classifier:
    torch.manual_seed(0)
    made = Classifier(1, 8, 4, 8, 1)
    for parameter in made.parameters():  # also the layers that begin at zero
        nn.init.normal_(parameter, std=0.2)
    return made


def distances(one: Tensor, other: Tensor) -> Tensor:
    return (one - other).flatten(1).norm(dim=1)


def test_a_disguise_raises_the_density_within_the_ball_and_the_box(model: Classifier) -> None:
    images = some_images()
    disguised = disguise(model, images, CLIMB)
    assert (log_density(model(disguised)) > log_density(model(images))).all()
    assert not disguised.requires_grad
    assert disguised.min() >= 0
    assert disguised.max() <= 1
    assert (distances(disguised, images) <= 0.7 + 1e-5).all()
    assert (distances(disguised, images) > 0.3).all()


def test_a_short_ascent_goes_as_far_as_its_steps(model: Classifier) -> None:
    images = 0.4 + 0.2 * some_images()  # far from the box's walls
    near = disguise(model, images, GradientAscent(radius=9.0, rate=0.05, steps=1))
    torch.testing.assert_close(distances(near, images), torch.full((6,), 0.05))


def test_misleading_raises_the_loss_from_a_point_that_is_drawn(model: Classifier) -> None:
    images, labels = some_images(), torch.tensor([0, 1, 2, 3, 0, 1])
    torch.manual_seed(5)
    misleading = mislead(model, images.clone().requires_grad_(), labels, CLIMB)
    assert not misleading.requires_grad, "though R1 asks for the images' gradients"
    before, after = (F.cross_entropy(model(x), labels, reduction="none") for x in (images, misleading))
    assert (after > before).all()
    assert (distances(misleading, images) <= 0.7 + 1e-5).all()
    torch.manual_seed(5)
    assert torch.equal(mislead(model, images, labels, CLIMB), misleading)
    assert not torch.equal(mislead(model, images, labels, CLIMB), misleading)


def test_parameters_keep_the_gradients_they_had(model: Classifier) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    with torch.no_grad():  # as in evaluation
        disguise(model, some_images(), CLIMB)
        mislead(model, some_images(), torch.zeros(6, dtype=torch.int64), CLIMB)
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert (parameter.grad == 3).all()
        assert parameter.requires_grad


def test_an_attack_does_not_depend_on_the_rest_of_the_batch(model: Classifier) -> None:
    images = some_images()
    torch.testing.assert_close(disguise(model, images, CLIMB)[:2], disguise(model, images[:2], CLIMB))


def test_a_zero_gradient_leaves_the_images_unchanged() -> None:
    images = some_images()
    assert torch.equal(CLIMB.maximize(lambda points: 0 * points.sum((1, 2, 3)), images), images)
