"""Models whose output carries its own loss, as Hugging Face's do: a mean over the batch's samples."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lockstep.engine.loss_table import Term
from lockstep.errors import UserError


def own_loss(model: Any, batch: Any) -> Term:
    """Call the model with the batch (a mapping as keywords, a tuple or list as arguments); turn its mean into a sum.

    The output is the loss itself, or has it as `.loss` or `["loss"]`. The loss is taken as a mean over the batch's
    samples or, if the output has a `.count` or `["count"]`, over that many elements: a mean over tokens needs that.
    """
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, list | tuple):
        output = model(*batch)
    else:
        output = model(batch)
    loss = output if isinstance(output, Tensor) else _part(output, "loss")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UserError(
            f"{type(model).__name__} returns no loss of its own (one number, as output.loss or output['loss']): "
            "give the trainer a loss function"
        )
    count = _part(output, "count")
    if count is None:
        count = batch_length(batch)
    return loss * count, count


def _part(output: Any, name: str) -> Any:
    if isinstance(output, Mapping):
        return output.get(name)
    if isinstance(output, tuple) and name not in getattr(output, "_fields", ()):
        return None  # tuple.count is a method
    return getattr(output, name, None)


def batch_length(batch: Any) -> int:
    """Return the length of the first tensor in a batch."""
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else [batch]
    for part in parts:
        if isinstance(part, Tensor) and part.dim():
            return len(part)
    raise UserError("cannot tell how many samples the batch has: add a `count` to the model's output")
