"""Tune hyperparameters with a search: learning rate, optimizer, size, dropout. Run it with any of:

    python examples/tune_digits.py
    lockstep run -n 2 examples/tune_digits.py --generations 4
    torchrun --nproc-per-node 2 examples/tune_digits.py

Every design is evaluated by a short training run on handwritten digits, in the next free process; the best is the one
with the lowest error on held-out images. Stop it at any time: when you run it again, it resumes.
The best design and the digest are the same on any number of processes.
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
from lockstep import search
from lockstep.loggers import console_for

EPOCHS = 10
BATCH = 32

# Rates are searched on a logarithmic scale. Genes of a group are inherited together: a rate suits its optimizer.
GENOME = search.Genome(
    [
        search.ChoiceGene("optimizer", ("sgd", "adamw", "rmsprop"), group="training"),
        search.FloatGene("log10_lr", -4.0, -0.5, group="training"),
        search.FloatGene("log10_weight_decay", -6.0, -1.0, group="training"),
        search.IntegerGene("width", 8, 128, group="model"),
        search.IntegerGene("layers", 1, 3, group="model"),
        search.FloatGene("dropout", 0.0, 0.6, group="model"),
    ]
)
DEFAULT = {"optimizer": "adamw", "log10_lr": -3.0, "log10_weight_decay": -2.0, "width": 32, "layers": 1, "dropout": 0.0}


class Images(NamedTuple):
    pixels: Tensor  # rows of 64 values from 0 to 1
    labels: Tensor


@cache
def load_images(split: str) -> Images:
    """Of every five images, use two for training, two for validation and one for the test."""
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
    """An ordinary training loop. Its random numbers (weights, order, dropout) are seeded by the search."""
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

    problem = search.Problem(GENOME, (search.Objective("error", unit="%"),), search.ScalarEvaluator(validation_error))
    settings = search.SearchSettings(
        population_size=args.population,
        max_generations=args.generations,
        network=None,  # evolution only
    )
    run = lockstep.Run("runs/tune_digits", world, seed=0, sinks=console_for())
    result = search.Search(run, problem, settings).run_complete_pipeline(DEFAULT)

    if world.is_main and result.best is not None:
        for name, design in (("default", DEFAULT), ("best", result.best.design)):
            torch.manual_seed(0)  # the same random numbers for both designs
            wrong = percent_wrong(train(design), load_images("test"))
            print(f"test error of the {name} design: {wrong:.2f} %")


if __name__ == "__main__":
    lockstep.launch(main)
