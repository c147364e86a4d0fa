"""Tuning a model's settings by a search: learning rate, optimizer, size, dropout. Any of these runs it:

    python examples/tune_digits.py
    lockstep run -n 2 examples/tune_digits.py --generations 4
    torchrun --nproc-per-node 2 examples/tune_digits.py

Every design is a short training on handwritten digits, by whichever process is free; the best is the one with the
fewest mistakes on images that it was not trained on. Stop it at any time: run again, it goes on where it was.
The best design and the digest are the same at any number of processes.
"""

import argparse
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import lockstep
from lockstep import ChoiceGene, FloatGene, IntegerGene
from lockstep.observe.console import console_for

EPOCHS = 10
BATCH = 32

# Rates are searched by their size. What is in a group is passed on together: a rate suits its optimizer.
GENOME = lockstep.Genome(
    [
        ChoiceGene("optimizer", ("sgd", "adamw", "rmsprop"), group="training"),
        FloatGene("log10_lr", -4.0, -0.5, group="training"),
        FloatGene("log10_weight_decay", -6.0, -1.0, group="training"),
        IntegerGene("width", 8, 128, group="model"),
        IntegerGene("layers", 1, 3, group="model"),
        FloatGene("dropout", 0.0, 0.6, group="model"),
    ]
)
USUAL = {"optimizer": "adamw", "log10_lr": -3.0, "log10_weight_decay": -2.0, "width": 32, "layers": 1, "dropout": 0.0}


class Images(NamedTuple):
    pixels: Tensor  # 64 numbers each, from 0 to 1
    labels: Tensor


@cache
def load_images(split: str) -> Images:
    """Of five images in a row, two are for training, two to choose settings by, one to judge the choice."""
    digits = load_digits()
    fifths = torch.arange(len(digits.target)) % 5
    rows = torch.isin(fifths, torch.tensor({"train": [0, 1], "validation": [2, 3], "test": [4]}[split]))
    return Images(torch.tensor(digits.data, dtype=torch.float32)[rows] / 16, torch.tensor(digits.target)[rows])


def make_model(design: dict[str, Any]) -> nn.Module:
    sizes = [64] + design["layers"] * [design["width"]]
    hidden = [
        module
        for inputs, outputs in pairwise(sizes)
        for module in (nn.Linear(inputs, outputs), nn.ReLU(), nn.Dropout(design["dropout"]))
    ]
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], 10))


def make_optimizer(design: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop}
    rates = {"lr": 10 ** design["log10_lr"], "weight_decay": 10 ** design["log10_weight_decay"]}
    return kinds[design["optimizer"]](model.parameters(), **rates)


def train(design: dict[str, Any]) -> nn.Module:
    """An ordinary training. What it draws at random (weights, order, dropout) begins at the design's own key."""
    images = load_images("train")
    model = make_model(design)
    optimizer = make_optimizer(design, model)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(images.labels)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(images.pixels[rows]), images.labels[rows]).backward()
            optimizer.step()
    return model.eval()


@torch.no_grad()
def percent_wrong(model: nn.Module, images: Images) -> float:
    return 100 * (model(images.pixels).argmax(1) != images.labels).double().mean().item()


def validation_error(design: dict[str, Any]) -> float:
    return percent_wrong(train(design), load_images("validation"))


def main(world: lockstep.World) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--population", type=int, default=16)
    args = parser.parse_args()

    problem = lockstep.Problem(GENOME, (lockstep.Objective("error", unit="%"),), lockstep.OneByOne(validation_error))
    settings = lockstep.SearchSettings(
        population_size=args.population,
        max_generations=args.generations,
        network=None,  # evolution alone
    )
    run = lockstep.Run("runs/tune_digits", world, seed=0, sinks=console_for())
    result = lockstep.Search(run, problem, settings).run_complete_pipeline(USUAL)

    if world.is_main and result.best is not None:
        for name, design in (("usual", USUAL), ("best", result.best.design)):
            torch.manual_seed(0)  # both draw the same: they differ by their design alone
            wrong = percent_wrong(train(design), load_images("test"))
            print(f"on images that nothing was chosen by, the {name} design is wrong in {wrong:.2f} %")


if __name__ == "__main__":
    lockstep.launch(main)
