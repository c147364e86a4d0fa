"""The gpt recipe: `lockstep train gpt`, or `lockstep train gpt -n 2 data.path=FILE model.width=256 precision=bf16`."""

from collections.abc import Mapping
from math import log
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.recipes.gpt import GptConfig
from lockstep.recipes.gpt.text import read_corpus, split_text
from lockstep.recipes.gpt.transformer import NUM_BYTES, GptNetwork, sample_text
from lockstep.train.recipe import Splits
from lockstep.train.run import Run
from lockstep.world.keyed_random import keyed_generator


class GptRecipe:
    """A language model of bytes: there is no tokenizer, so it trains on any file."""

    config_class = GptConfig

    def model(self, config: GptConfig) -> nn.Module:
        size = config.model
        return GptNetwork(size.width, size.depth, size.heads, config.data.length, size.dropout)

    def data(self, config: GptConfig) -> Splits:
        return split_text(read_corpus(config.data.path), config.data.length)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        scores, targets = _predict(model, batch)
        return F.cross_entropy(scores, targets, reduction="sum"), len(targets)

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor | float, int]]:
        scores, targets = _predict(model, batch)
        return {
            "bits_per_byte": (F.cross_entropy(scores, targets, reduction="sum") / log(2), len(targets)),
            "accuracy": ((scores.argmax(1) == targets).sum(), len(targets)),
        }

    def conclude(self, run: Run, model: nn.Module, config: GptConfig) -> None:
        """Log a sample of generated text. All ranks take part, because each may hold only a shard of the model."""
        if config.data.sample:
            assert isinstance(model, GptNetwork)
            text = sample_text(model, config.data.sample, config.data.temperature, keyed_generator(run.seed, "sample"))
            run.log_text("sample", text)


recipe = GptRecipe()


def _predict(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the logits and the target bytes, one row per byte."""
    (windows,) = batch
    scores = model(windows[:, :-1])
    return scores.reshape(-1, NUM_BYTES), windows[:, 1:].reshape(-1).long()
