"""Read a text as bytes, and cut it into windows for training and test.

A window is `length` bytes and the one that follows: each byte but the first is predicted from those before it. Training
windows start at every byte. Test windows do not overlap, so that each byte of the test is predicted once.
"""

from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lockstep.errors import UserError
from lockstep.train.recipe import Splits

_TEST_EVERY = 10  # one byte in ten is held out for the test, at the end of the text
_MAX_BYTES = 2**30  # every process holds the whole text in memory


def read_corpus(path: str | None) -> Tensor:
    """Return a file's bytes or, without one, the topics of Python's `help()`: half a megabyte of English and code."""
    if path is None:
        return _as_tensor("\n\n".join(topics[name] for name in sorted(topics)).encode())
    file = Path(path).expanduser()
    try:
        if not file.is_file():  # also refuses endless devices, such as /dev/zero
            is_there = file.exists()
            raise UserError(f"data.path={path}: {'not a file' if is_there else 'no such file'} (from {Path.cwd()})")
        with file.open("rb") as opened:
            data = opened.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UserError(f"data.path={path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > _MAX_BYTES:
        raise UserError(f"data.path={path}: longer than {_MAX_BYTES:,} bytes: train on a part of it")
    return _as_tensor(data)


def split_text(text: Tensor, length: int) -> Splits:
    """Split a text: its last tenth, in whole windows, is the test set; no training window contains a byte of it."""
    test_windows = len(text) // _TEST_EVERY // length
    needed = _TEST_EVERY * length
    if test_windows < 1:
        raise UserError(
            f"the text has {len(text):,} bytes, and windows of data.length={length} need {needed:,}: "
            "give a longer text (data.path=FILE) or a smaller data.length"
        )
    border = len(text) - test_windows * length - 1
    return Splits(
        train=TensorDataset(text[:border].unfold(0, length + 1, 1)),  # views: the text is in memory once
        test=TensorDataset(text[border:].unfold(0, length + 1, length)),
    )


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
