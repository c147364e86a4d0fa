"""Run it: `lockstep train gpt`, or `lockstep train gpt -n 2 data.path=FILE model.width=256 precision=bf16`."""

from collections.abc import Mapping
from math import log
from typing import Annotated, Any

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from lockstep.config.fields import Count, Frozen, Positive, Whole
from lockstep.config.schema import Config
from lockstep.recipes.gpt.sampling import write
from lockstep.recipes.gpt.text import cut, read_text
from lockstep.recipes.gpt.transformer import NUM_BYTES, Gpt
from lockstep.recipes.heads import Heads
from lockstep.train.recipe import Splits
from lockstep.train.run import Run
from lockstep.world.randomness import stream


class GptModel(Frozen):
    width: Count = 128
    depth: Count = 2  # blocks
    heads: Heads = 4
    dropout: Annotated[float, Field(ge=0, lt=1, strict=True, allow_inf_nan=False)] = 0.0


class GptData(Frozen):
    path: str | None = None  # any file, from the working directory; the topics of Python's help() if there is none
    length: Count = 64  # bytes that the model sees at a time
    sample: Whole = 400  # bytes to write after training
    temperature: Positive = 0.7  # of that: lower keeps to what is likely


class GptConfig(Config):
    model: GptModel = GptModel()
    data: GptData = GptData()


class GptRecipe:
    """A language model of bytes: no tokenizer, so any file will do."""

    config_class = GptConfig

    def model(self, config: GptConfig) -> nn.Module:
        size = config.model
        return Gpt(size.width, size.depth, size.heads, config.data.length, size.dropout)

    def data(self, config: GptConfig) -> Splits:
        return cut(read_text(config.data.path), config.data.length)

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
        """Let the model write something. All ranks do, the same: each may have only a part of the model."""
        if config.data.sample:
            assert isinstance(model, Gpt)
            text = write(model, config.data.sample, config.data.temperature, stream(run.seed, "sample"))
            run.log_text("sample", text)


recipe = GptRecipe()


def _predict(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Scores and the bytes that came, one row a byte."""
    (windows,) = batch
    scores = model(windows[:, :-1])
    return scores.reshape(-1, NUM_BYTES), windows[:, 1:].reshape(-1).long()
