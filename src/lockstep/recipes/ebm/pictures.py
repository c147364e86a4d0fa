"""What a trained model thinks of: images that it climbs to, class by class; and what an attack makes of outsiders."""

import torch
from torch import Generator, Tensor, nn

from lockstep.recipes.ebm.attack import Climb, disguise
from lockstep.recipes.images.grid import mosaic

_ROWS = 6  # images of each class


def imagined(model: nn.Module, shape: tuple[int, int, int], num_classes: int, climb: Climb, draw: Generator) -> Tensor:
    """A column for each class: from faint noise, up the score of that class."""
    device = next(model.parameters()).device
    start = (0.5 + 0.1 * torch.randn(_ROWS * num_classes, *shape, generator=draw)).clamp(0, 1).to(device)
    wanted = torch.arange(num_classes, device=device).repeat(_ROWS)

    def of_the_wanted_class(images: Tensor) -> Tensor:
        scores: Tensor = model(images)
        return scores.gather(1, wanted[:, None])[:, 0]

    return mosaic(climb.up(of_the_wanted_class, start), num_classes)


def before_and_after(model: nn.Module, outsiders: Tensor, climb: Climb) -> Tensor:
    """Outsiders above, and below each of them what the attack made of it to look like data."""
    outsiders = outsiders.to(next(model.parameters()).device)
    return mosaic(torch.cat([outsiders, disguise(model, outsiders, climb)]), len(outsiders))
