"""Many images as one, in rows: what a run shows."""

import torch
from torch import Tensor

_SIDE = 64  # about as large as an image should be shown, in pixels
_GAP = 1.0  # white


def mosaic(images: Tensor, columns: int) -> Tensor:
    """Images (N, C, H, W) of values from 0 to 1 as one (C, H', W'), row by row, with one white pixel between them.

    Small ones are enlarged by a whole factor. Places that are left over in the last row are white.
    """
    count, channels, height, width = images.shape
    columns = max(1, min(columns, count))
    rows = -(-count // columns)
    factor = max(1, round(_SIDE / max(height, width)))
    height, width = height * factor, width * factor
    enlarged = images.detach().float().clamp(0, 1).repeat_interleave(factor, 2).repeat_interleave(factor, 3)
    made = torch.full((channels, rows * (height + 1) - 1, columns * (width + 1) - 1), _GAP, device=images.device)
    for number, image in enumerate(enlarged):
        top, left = number // columns * (height + 1), number % columns * (width + 1)
        made[:, top : top + height, left : left + width] = image
    return made
