"""ResNet-50 and a GPT through their recipes, against hand-written loops of the same model, loss and optimizer.

    .venv/bin/python bench/recipes.py [--only resnet|gpt] [--rounds 6] [--steps 5] [--tiny] [--device auto]

One process, bf16, eager, data already on the device. The hand-written loops are plain autocast loops; with
micro-batches, they run a backward pass for each part of the batch, as lanes do. The variants alternate in one process;
each selects its kernels first: the fastest, or deterministic ones. `--tiny`: small sizes, for a CPU.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.bench.interleaved_timing import interleave
from lockstep.config.environment import set_cublas_workspace
from lockstep.config.train_schema import Config
from lockstep.recipes.registry import load_recipe
from lockstep.recipes.resnet.resnet_network import VARIANTS, ResNet
from lockstep.train.optim.optimizer_factory import build_optimizer
from lockstep.train.recipe import recipe_for_run
from lockstep.train.run import Run
from lockstep.world.determinism import set_determinism_flags
from lockstep.world.process_group import setup_distributed
from lockstep.world.world import World

NUM_BATCHES = 4  # of different samples


class Work(NamedTuple):
    title: str
    config: Config  # the recipe's, for its optimizer and its clipping
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], tuple[Tensor, int]]
    samples: tuple[Tensor, ...]  # on the device
    batch: int
    unit: str
    units: int  # in a batch


def resnet(device: torch.device, is_tiny: bool) -> Work:
    """The recipe's network and loss, for images of ImageNet's size and number of classes."""
    recipe, config = load_recipe("resnet")
    variant, classes, side, batch = ("resnet50", 1000, 224, 256) if not is_tiny else ("resnet18", 10, 32, 16)
    count = NUM_BATCHES * batch
    pixels = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, device=device)
    labels = torch.randint(0, classes, (count,), device=device)
    half = torch.full((3,), 0.5)
    return Work(
        f"{variant}, {batch} × 3 × {side} × {side}",
        config,
        lambda: ResNet(VARIANTS[variant], classes, half, half / 2),
        recipe_for_run(config, recipe).loss,
        (pixels, labels),
        batch,
        "images",
        batch,
    )


def gpt(device: torch.device, is_tiny: bool) -> Work:
    width, depth, heads, length, batch = (768, 12, 12, 1024, 32) if not is_tiny else (32, 2, 2, 32, 16)
    sizes = {"model.width": width, "model.depth": depth, "model.heads": heads, "data.length": length}
    recipe, config = load_recipe("gpt", [f"{key}={value}" for key, value in sizes.items()])
    windows = torch.randint(0, 256, (NUM_BATCHES * batch, length + 1), dtype=torch.uint8, device=device)
    return Work(
        f"GPT of bytes, width {width}, depth {depth}, {batch} × {length}",
        config,
        lambda: recipe.model(config),
        recipe.loss,
        (windows,),
        batch,
        "tokens",
        batch * length,
    )


WORKS = {"resnet": resnet, "gpt": gpt}


def by_hand(work: Work, world: World, steps: int, *, deterministic: bool, micro_batches: int = 1) -> Callable[[], None]:
    torch.manual_seed(0)
    device = world.device
    model = work.model().to(device)
    optimizer = build_optimizer(model, work.config.optim, work.batch)
    batches = list(zip(*(tensor.split(work.batch) for tensor in work.samples), strict=True))

    def run() -> None:
        set_determinism_flags(device, tf32=False, deterministic=deterministic)
        for number in range(steps):
            batch = batches[number % NUM_BATCHES]
            for part in zip(*(tensor.chunk(micro_batches) for tensor in batch), strict=True):
                with torch.autocast(device.type, torch.bfloat16):
                    total, count = work.loss(model, part)
                (total / (count * micro_batches)).backward()
            if work.config.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), work.config.clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        _wait(device)

    return run


def by_recipe(work: Work, world: World, steps: int, *, determinism: str, lanes: int) -> Callable[[], None]:
    run = Run(None, world, precision="bf16", clip_norm=work.config.clip_norm, determinism=determinism)
    model = run.prepare(work.model())
    optimizer = run.optimizer(model, build_optimizer(model, work.config.optim, work.batch))
    loader = run.loader(TensorDataset(*work.samples), work.batch, lanes=lanes)
    training = iter(run.steps(loader, steps=10**9, finish=False))

    def advance() -> None:
        set_determinism_flags(world.device, tf32=False, deterministic=determinism == "lockstep")
        for _ in range(steps):
            step = next(training)
            step.accumulate(work.loss, model)
            step.update(optimizer)
        _wait(world.device)

    return advance


def compare(work: Work, world: World, rounds: int, steps: int) -> str:
    variants = {
        "hand-written": by_hand(work, world, steps, deterministic=False),
        "recipe, fast": by_recipe(work, world, steps, determinism="fast", lanes=1),
        "hand-written, deterministic kernels": by_hand(work, world, steps, deterministic=True),
        "recipe, lockstep, 1 lane": by_recipe(work, world, steps, determinism="lockstep", lanes=1),
        "hand-written, deterministic kernels, 8 micro-batches": by_hand(
            work, world, steps, deterministic=True, micro_batches=8
        ),
        "recipe, lockstep, 8 lanes": by_recipe(work, world, steps, determinism="lockstep", lanes=8),
    }
    timings = interleave(variants, rounds, steps)
    parameters = sum(parameter.numel() for parameter in work.model().parameters())
    lines = [f"{work.title}, {parameters / 1e6:.1f}M parameters, {world.device}, {rounds} rounds of {steps} steps"]
    lines += [
        f"| | ms per step | {work.unit}/s | relative to hand-written | range by round | relative to the line above |"
    ]
    lines += ["|---|---|---|---|---|---|"]
    for number, timing in enumerate(timings):
        to_line_above = f"{timing.median_s / timings[number - 1].median_s:.3f}" if number % 2 else ""
        rate, of = work.units / timing.median_s, timing.ratio
        lines.append(
            f"| {timing.name} | {1e3 * timing.median_s:.1f} | {rate:,.0f} | {of.median:.3f} "
            f"| {of.low:.2f}–{of.high:.2f} | {to_line_above} |"
        )
    return "\n".join(lines)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=WORKS)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    torch.set_num_threads(1)
    set_cublas_workspace()  # before the first matrix product, for all variants: later it has no effect
    world = setup_distributed(device=None if options.device == "auto" else options.device)
    for name, make in WORKS.items():
        if options.only in (None, name):
            print(compare(make(world.device, options.tiny), world, options.rounds, options.steps), flush=True)
            print()


if __name__ == "__main__":
    main()
