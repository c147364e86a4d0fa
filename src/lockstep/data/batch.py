"""What a loader yields: one global batch, as the lanes of it that this rank runs."""

from typing import Any, NamedTuple

from torch import Tensor


class LaneBatch(NamedTuple):
    lane: int
    data: Any  # collated, on the device; None when the lane has no samples (padding counts as samples here)
    size: int  # samples in it, padding not counted; 0: the lane is empty
    weight: Tensor | None  # tail "pad" only: 1.0 for a sample, 0.0 for padding (float32, one for each row)


class GlobalBatch(NamedTuple):
    number: int  # batches consumed before this one, since the run began; counts from 0 over all epochs
    epoch: int  # from 0
    size: int  # samples over all lanes of all ranks, padding not counted
    lanes: tuple[LaneBatch, ...]  # this rank's, in lane order
