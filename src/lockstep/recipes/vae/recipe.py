"""Run it: `lockstep train vae`, or `lockstep train vae -n 2 data.path=FOLDER model.latent=128 model.width=64`.

The model alone, for a script of one's own: `lockstep.get_model("vae")(config)`.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import log, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.config.fields import Count, Frozen, NonNegative, Whole
from lockstep.config.schema import Config
from lockstep.errors import UserError
from lockstep.metrics.tally import Part
from lockstep.recipes.images.collection import ImageSplits
from lockstep.recipes.images.source import load_images
from lockstep.recipes.vae import pictures
from lockstep.recipes.vae.active_units import ActiveUnits
from lockstep.recipes.vae.autoencoder import Autoencoder, Shape
from lockstep.recipes.vae.likelihood import Kind
from lockstep.recipes.vae.likeness import Comparison, compare
from lockstep.recipes.vae.warmup import BetaWarmup
from lockstep.train.callbacks import Callback
from lockstep.train.recipe import Splits
from lockstep.train.run import Run
from lockstep.train.strategies.strategy import unwrapped
from lockstep.world.randomness import stream

_SMALLEST, _LARGEST = 8, 64  # sides of an image, in pixels


class VaeModel(Frozen):
    image: tuple[Count, Count, Count] | None = None  # channels, height, width; the data's if left out
    latent: Count = 16  # numbers that an image is compressed into
    width: Count = 32  # channels of the first layer
    likelihood: Kind = "bernoulli"  # ink on paper, or any values
    beta: NonNegative = 1.0  # weight of the codes' cost; above 1, simpler codes and coarser images
    beta_warmup: Whole = 0  # steps over which it rises


class VaeData(Frozen):
    path: str | None = None  # a folder in CIFAR's or MNIST's format; scikit-learn's digits if there is none
    test_every: Count = 5  # of the digits, the one with index i is a test image when i % test_every == 0
    drawn: Whole = 1000  # images to draw after training and compare with real ones


class VaeConfig(Config):
    model: VaeModel = VaeModel()
    data: VaeData = VaeData()


class Vae:
    """A variational auto-encoder: the loss is what images and their codes cost, in nats per image."""

    config_class = VaeConfig

    def __init__(self, config: VaeConfig) -> None:
        self._settings = config
        self._warmup = BetaWarmup(config.model.beta, config.model.beta_warmup)

    @cached_property
    def _images(self) -> ImageSplits:
        return load_images(self._settings.data.path, self._settings.data.test_every)

    def model(self, config: VaeConfig) -> nn.Module:
        size = config.model
        shape = Shape(*(size.image or self._images.shape))
        if not all(_SMALLEST <= side <= _LARGEST for side in shape[1:]):
            raise UserError(
                f"images of {_shown(shape)}: the vae recipe takes sides of {_SMALLEST} to {_LARGEST} pixels"
            )
        return Autoencoder(shape, size.latent, size.width, size.likelihood, size.beta)

    def data(self, config: VaeConfig) -> Splits:
        images = self._images
        if config.model.image not in (None, images.shape):
            raise UserError(
                f"model.image={_shown(config.model.image)}, but the images are {_shown(images.shape)}: leave it away"
            )
        return Splits(TensorDataset(images.train.pixels), TensorDataset(images.test.pixels))

    def callbacks(self, config: VaeConfig) -> Sequence[Callback]:  # noqa: ARG002
        return [self._warmup]

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """One sum, not one for each part: they have the same count, and a part of its own costs a backward pass."""
        made = model(*batch)
        return (made["reconstruction"] + self._warmup.beta * made["kl"].sum(1)).sum(), len(made["kl"])

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Part]:
        """`nats`: the negative ELBO of an image, with beta 1 whatever training has."""
        made = model(*batch)
        reconstruction, kl, count = made["reconstruction"].sum(), made["kl"].sum(), len(made["kl"])
        found: dict[str, Part] = {
            "nats": (reconstruction + kl, count),
            "reconstruction": (reconstruction, count),
            "kl": (kl, count),
            "active_units": ActiveUnits(made["mean"]),
        }
        if self._settings.model.likelihood == "gaussian":
            values = count * prod(batch[0].shape[1:])
            found["bits_per_value"] = ((reconstruction + kl) / log(2), values)
        return found

    @torch.no_grad()
    def conclude(self, run: Run, model: nn.Module, config: VaeConfig) -> None:
        """Show what it has learned. All ranks do, the same: each may have only a part of the model."""
        model = unwrapped(model)
        assert isinstance(model, Autoencoder)
        model.eval()
        train, test = (split.pixels.to(run.world.device) for split in self._images[:2])
        run.log_image("reconstructions", pictures.reconstructions(model, test))
        run.log_image("samples", pictures.samples(model, stream(run.seed, "samples")))
        run.log_image("walks", pictures.walks(model, test))
        if config.data.drawn:
            drawn = model.draw(config.data.drawn, stream(run.seed, "drawn"))
            found = compare(drawn, train, test, stream(run.seed, "noise"))
            run.log(likeness={name: likeness._asdict() for name, likeness in found._asdict().items()})
            run.log_text("likeness to training images", _table(found))


recipe = Vae


def _shown(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))


def _table(found: Comparison) -> str:
    lines = [f"{'':6} precision  coverage"]
    lines += [f"{name:6} {each.precision:9.3f} {each.coverage:9.3f}" for name, each in found._asdict().items()]
    return "\n".join(lines)
