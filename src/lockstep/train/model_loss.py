"""Models whose output carries its own loss, as Hugging Face's do: a mean over the batch's samples."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lockstep.engine.loss_table import Term
from lockstep.errors import UserError


def own_loss(model: Any, batch: Any) -> Term:
    """Call the model with the batch (a mapping as keywords, a tuple or list as arguments); turn its mean into a sum.

    The output is the loss itself, or has it as `.loss` or `["loss"]`. The loss is taken as a mean over the batch's
    samples or, if the output has a `.count` or `["count"]`, over that many elements: a mean over tokens needs that.
    """
    positional, by_name = ([], batch) if isinstance(batch, Mapping) else (batch, {})
    if not isinstance(positional, list | tuple):
        positional = [positional]
    try:
        output = model(*positional, **by_name)
    except TypeError:
        _check_arguments(model, positional, by_name)
        raise
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


def _check_arguments(model: Any, positional: Sequence[Any], by_name: Mapping[str, Any]) -> None:
    """Raise if the model cannot take a batch of this kind."""
    try:
        inspect.signature(model.forward).bind(*positional, **by_name)
    except TypeError as error:
        kind = f"forward(**batch) with {', '.join(by_name)}" if by_name else f"forward(*batch) with {len(positional)}"
        raise UserError(
            f"without a loss function, the batch goes to {type(model).__name__}.{kind}, which does not fit: {error}: "
            "give the trainer a loss(model, batch)"
        ) from None


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
