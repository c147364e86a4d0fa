"""`gan.py` in plain PyTorch: the same models, data, batch and optimizers, with DistributedDataParallel.

    python examples/gan_plain_ddp.py
    torchrun --nproc-per-node 2 examples/gan_plain_ddp.py --steps 500
    lockstep run -n 2 examples/gan_plain_ddp.py

It writes its picture to gan_plain_ddp.pgm.

What it lacks, although it is written carefully:
- The result depends on the number of processes: noise depends on the rank, and gradients are added in another order.
- The batch must be divisible by the number of processes.
- Under plain `python` the process uses as many threads as there are cores, which can change the last bits too.
- Nothing is saved or checked: no run folder, no digest to compare, no report of a NaN.
- Seeds, sampler, wrappers, means over ranks and rank 0's tasks are all written by hand, and an omission often goes
  unnoticed.
"""

import argparse
import os
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported after init_process_group, it would hold the group until Python exits
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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


def mean_over_ranks(value: Tensor) -> float:
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train(num_steps: int) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if BATCH % num_ranks:
        raise SystemExit(f"a batch of {BATCH} cannot be shared by {num_ranks} processes")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    torch.manual_seed(0)  # the same weights on all ranks
    generator = DistributedDataParallel(make_generator().to(device))
    discriminator = DistributedDataParallel(make_discriminator().to(device))
    torch.manual_seed(1 + rank)  # but different noise
    generator_optimizer = make_optimizer(generator)
    discriminator_optimizer = make_optimizer(discriminator)
    # Of the unwrapped module: all ranks have the same weights, so each can average by itself.
    average = AveragedModel(generator.module, multi_avg_fn=get_ema_multi_avg_fn(0.995))

    images = load_images()
    sampler = DistributedSampler(images, shuffle=True, seed=0, drop_last=True)
    loader = DataLoader(images, batch_size=BATCH // num_ranks, sampler=sampler, drop_last=True)
    shown = torch.randn(64, NOISE, generator=torch.Generator().manual_seed(0)).to(device)

    step = 0
    for epoch in count() if num_steps > 0 else ():
        sampler.set_epoch(epoch)  # otherwise every epoch has the same order
        for (real,) in loader:
            step += 1
            real = real.to(device)

            # Call only the wrapper of the model being trained: the other's hooks would wait for gradients that never
            # arrive.
            with torch.no_grad():
                fake = generator.module(torch.randn(len(real), NOISE, device=device))
            both = discriminator(torch.cat([real, fake]))  # one call: DDP expects one per backward pass
            discriminator_loss = F.softplus(-both[: len(real)]).mean() + F.softplus(both[len(real) :]).mean()
            discriminator_optimizer.zero_grad()
            discriminator_loss.backward()
            discriminator_optimizer.step()

            discriminator.requires_grad_(False)
            fake = generator(torch.randn(len(real), NOISE, device=device))
            generator_loss = F.softplus(-discriminator.module(fake)).mean()
            generator_optimizer.zero_grad()
            generator_loss.backward()
            generator_optimizer.step()
            discriminator.requires_grad_(True)
            average.update_parameters(generator.module)

            if step % 500 == 0 or step == num_steps:
                losses = mean_over_ranks(discriminator_loss), mean_over_ranks(generator_loss)  # on every rank
                if rank == 0:
                    print(f"step {step}: discriminator_loss {losses[0]:.6g}, generator_loss {losses[1]:.6g}")
            if step == num_steps:
                if rank == 0:
                    with torch.no_grad():
                        pixels = (tiled(average(shown)) * 255).round().byte().flatten().tolist()
                    Path("gan_plain_ddp.pgm").write_bytes(b"P5 64 64 255\n" + bytes(pixels))
                return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    # Without a launcher, make a process group of one, so that the code above needs no special case.
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if has_gpu else "gloo", **alone)
    try:
        train(args.steps)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
