"""The vae recipe: `lockstep train vae`, or `lockstep train vae -n 2 data.path=FOLDER model.latent=128`.

To use the model alone in your own script: `lockstep.get_model("vae")(config)`.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import log, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.errors import UserError
from lockstep.metrics.aggregator import MetricValue
from lockstep.recipes.images.image_source import load_images
from lockstep.recipes.images.image_splits import ImageSplits, format_shape
from lockstep.recipes.vae import VaeConfig, vae_pictures
from lockstep.recipes.vae.autoencoder import Autoencoder, ImageShape
from lockstep.recipes.vae.vae_metrics import ActiveUnits, Comparison, compare_images
from lockstep.train.callbacks import Callback
from lockstep.train.recipe import Splits
from lockstep.train.run import Run
from lockstep.train.strategies.parallel_strategy import unwrapped
from lockstep.train.trainer import Trainer
from lockstep.world.keyed_random import keyed_generator


class BetaWarmup(Callback):
    """Raises the weight of the KL term linearly, so that the codes carry information before the term penalizes it.

    It depends on the step alone, so there is nothing to save.
    """

    def __init__(self, beta: float, steps: int) -> None:
        self._beta = beta
        self._steps = steps
        self._trainer: Trainer | None = None

    def on_start(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def beta(self) -> float:
        """The weight in the current step; outside of training, the final one."""
        if self._trainer is None:
            return self._beta
        return self.after(self._trainer.step)

    def after(self, steps: int) -> float:
        """Return the weight after `steps` completed steps."""
        return self._beta if steps >= self._steps else self._beta * (steps + 1) / (self._steps + 1)


_MIN_SIDE, _MAX_SIDE = 8, 64  # of an image, in pixels


class VaeRecipe:
    """A variational autoencoder; its loss is the negative ELBO in nats per image, with the KL term weighted by beta."""

    config_class = VaeConfig

    def __init__(self, config: VaeConfig) -> None:
        self._settings = config
        self._warmup = BetaWarmup(config.model.beta, config.model.beta_warmup)

    @cached_property
    def _images(self) -> ImageSplits:
        return load_images(self._settings.data.path, self._settings.data.test_every)

    def model(self, config: VaeConfig) -> nn.Module:
        size = config.model
        shape = ImageShape(*(size.image or self._images.shape))
        if not all(_MIN_SIDE <= side <= _MAX_SIDE for side in shape[1:]):
            raise UserError(f"images of {format_shape(shape)}: expected sides of {_MIN_SIDE} to {_MAX_SIDE} pixels")
        return Autoencoder(shape, size.latent, size.width, size.likelihood, size.beta)

    def data(self, config: VaeConfig) -> Splits:
        images = self._images
        if config.model.image not in (None, images.shape):
            given, found = format_shape(config.model.image), format_shape(images.shape)
            raise UserError(f"model.image={given}, but the images are {found}: omit it")
        return Splits(TensorDataset(images.train.pixels), TensorDataset(images.test.pixels))

    def callbacks(self, config: VaeConfig) -> Sequence[Callback]:  # noqa: ARG002
        return [self._warmup]

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """Return one sum, not one per term: the counts are equal, and each separate term costs a backward pass."""
        output = model(*batch)
        return (output["reconstruction"] + self._warmup.beta * output["kl"].sum(1)).sum(), len(output["kl"])

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, MetricValue]:
        """`nats` is the negative ELBO of an image, with beta 1 whatever the training uses."""
        output = model(*batch)
        reconstruction, kl, count = output["reconstruction"].sum(), output["kl"].sum(), len(output["kl"])
        metrics: dict[str, MetricValue] = {
            "nats": (reconstruction + kl, count),
            "reconstruction": (reconstruction, count),
            "kl": (kl, count),
            "active_units": ActiveUnits(output["mean"]),
        }
        if self._settings.model.likelihood == "gaussian":
            values = count * prod(batch[0].shape[1:])
            metrics["bits_per_value"] = ((reconstruction + kl) / log(2), values)
        return metrics

    @torch.no_grad()
    def conclude(self, run: Run, model: nn.Module, config: VaeConfig) -> None:
        """Log pictures and sample quality. All ranks take part, because each may hold only a shard of the model."""
        model = unwrapped(model)
        assert isinstance(model, Autoencoder)
        model.eval()
        train, test = (split.pixels.to(run.world.device) for split in self._images[:2])
        run.log_image("reconstructions", vae_pictures.reconstructions(model, test))
        run.log_image("samples", vae_pictures.samples(model, keyed_generator(run.seed, "samples")))
        run.log_image("walks", vae_pictures.walks(model, test))
        if config.data.drawn:
            drawn = model.draw(config.data.drawn, keyed_generator(run.seed, "drawn"))
            found = compare_images(drawn, train, test, keyed_generator(run.seed, "noise"))
            run.log(likeness={name: likeness._asdict() for name, likeness in found._asdict().items()})
            run.log_text("likeness to training images", _table(found))


recipe = VaeRecipe


def _table(comparison: Comparison) -> str:
    lines = [f"{'':6} precision  coverage"]
    lines += [f"{name:6} {each.precision:9.3f} {each.coverage:9.3f}" for name, each in comparison._asdict().items()]
    return "\n".join(lines)
