"""How many of a code's numbers say anything about the image: those whose mean differs from image to image."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.metrics.average import column_sums
from lockstep.metrics.keepers import Rows

_LEAST_VARIANCE = 0.01  # of the means over all images; numbers that say nothing have next to none


@dataclass(frozen=True, eq=False)
class ActiveUnits:
    """A metric: the number of them, over all images of all chunks."""

    means: Tensor  # (images, latent)

    def value(self, device: torch.device) -> Tensor:
        means = self.means.detach().to(device, torch.float64)
        count = torch.full((1,), float(len(means)), dtype=torch.float64, device=device)
        return torch.cat([count, means.sum(0), means.square().sum(0)])

    def keeper(self) -> Rows:
        return Rows()

    def result(self, kept: Tensor) -> float:
        count, *sums = column_sums(kept)
        first, second = sums[: len(sums) // 2], sums[len(sums) // 2 :]
        variances = [square / count - (mean / count) ** 2 for mean, square in zip(first, second, strict=True)]
        return float(sum(variance > _LEAST_VARIANCE for variance in variances))
