"""A GAN on handwritten digits: two models, two optimizers, and an EMA of the generator. Run it with any of:

    python examples/gan.py
    lockstep run -n 2 examples/gan.py --steps 500
    torchrun --nproc-per-node 2 examples/gan.py

It writes a picture of 64 generated digits to runs/gan/media.
The last line is a digest of both models, both optimizers and the EMA: the same on any number of processes.
`gan_plain_ddp.py` is the same training without lockstep.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep

NOISE = 16  # the generator's input size
BATCH = 64  # over all processes


def make_generator() -> nn.Module:
    return nn.Sequential(
        nn.Linear(NOISE, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, 64), nn.Tanh()
    )


def make_discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)
    )


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.999))


def load_images() -> TensorDataset:
    """Return 1,797 images of 8 × 8 pixels, from −1 to 1, as rows."""
    return TensorDataset(torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1)


def tiled(images: Tensor) -> Tensor:
    """Arrange 64 images as one of 64 × 64 pixels, from 0 to 1."""
    return (images.view(8, 8, 8, 8).transpose(1, 2).reshape(64, 64) + 1) / 2


def main(world: lockstep.World) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()

    run = lockstep.Run("runs/gan", world, seed=0)
    generator, discriminator = run.prepare(make_generator()), run.prepare(make_discriminator())
    generator_optimizer = run.optimizer(generator, make_optimizer(generator))
    discriminator_optimizer = run.optimizer(discriminator, make_optimizer(discriminator))
    ema = run.ema(generator, decay=0.995)

    def fakes(count: int) -> Tensor:
        return generator(torch.randn(count, NOISE, device=world.device))  # the same on any number of processes

    # A loss returns a sum over the lane's images, and their number. Only the model given to `accumulate` is trained.
    def discriminator_loss(discriminator: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
        (real,) = batch
        with torch.no_grad():
            fake = fakes(len(real))
        return F.softplus(-discriminator(real)).sum() + F.softplus(discriminator(fake)).sum(), len(real)

    def generator_loss(_: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
        (real,) = batch
        return F.softplus(-discriminator(fakes(len(real)))).sum(), len(real)

    loader = run.loader(load_images(), global_batch=BATCH, lanes=4)
    shown = torch.randn(64, NOISE, generator=torch.Generator().manual_seed(0)).to(world.device)
    for step in run.steps(loader, steps=args.steps):
        step.accumulate(discriminator_loss, discriminator)
        step.update(discriminator_optimizer)
        discriminator_value = step.loss_tensor
        step.accumulate(generator_loss, generator)
        step.update(generator_optimizer)  # also updates the EMA
        if step.every(500) or step.number == args.steps:
            run.log(discriminator_loss=discriminator_value.item(), generator_loss=step.loss)
        if step.number == args.steps:
            with torch.no_grad(), ema.applied():
                run.log_image("samples", tiled(generator(shown)))


if __name__ == "__main__":
    lockstep.launch(main)
