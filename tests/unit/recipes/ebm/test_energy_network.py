"""The ebm recipe's network: images of any usual size, and no image affects another's scores."""

import pytest
import torch

from lockstep.recipes.ebm.energy_network import Classifier, log_density


@pytest.mark.parametrize(("channels", "height", "width"), [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 9, 7)])
def test_scores_for_images_of_any_size_and_every_parameter_learns(channels: int, height: int, width: int) -> None:
    torch.manual_seed(0)
    model = Classifier(channels, min(height, width), 5, 4, 2)
    images = torch.rand(3, channels, height, width)
    scores = model(images)
    assert scores.shape == (3, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):  # blocks start as the identity: only their last layers have gradients in the first step
        optimizer.zero_grad()
        model(images).square().sum().backward()
        optimizer.step()
    still = [name for name, parameter in model.named_parameters() if not parameter.grad.any()]  # type: ignore[union-attr]
    assert still == []


def test_the_scores_of_an_image_do_not_depend_on_the_batch() -> None:
    model = Classifier(1, 8, 5, 4, 1)
    assert list(model.buffers()) == []
    images = torch.rand(4, 1, 8, 8)
    torch.testing.assert_close(model(images)[:1], model(images[:1]))


def test_the_density_is_the_sum_over_classes() -> None:
    scores = torch.tensor([[0.0, 1.0, -2.0], [3.0, 3.0, 3.0]])
    torch.testing.assert_close(log_density(scores).exp(), scores.exp().sum(1))
