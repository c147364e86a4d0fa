"""Tensor files of a checkpoint: write with a hash, read back verified, assemble sharded tensors."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.checkpoint import durable_files
from lockstep.checkpoint.manifest import CheckpointError, ShardedTensor, ShardPiece, StoredFile, printable_line


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> StoredFile:
    """Write a new file of contiguous CPU tensors and flush it to disk."""
    save_file(dict(tensors), path)
    with ThreadPoolExecutor(1) as thread:  # flushing waits for the disk while hashing uses the processor
        flushing = thread.submit(durable_files.flush, path)
        stored = StoredFile(path.stat().st_size, durable_files.content_hash(path))
        flushing.result()
    return stored


def write_tensors_to_memory(path: Path, tensors: Mapping[str, Tensor]) -> StoredFile:
    """Write a new file to a file system in memory: no flush, and no other thread, so that its cost can be measured."""
    save_file(dict(tensors), path)
    return StoredFile(path.stat().st_size, durable_files.content_hash(path, max_threads=1))


def read_tensor_file(checkpoint: Path, name: str, stored: StoredFile) -> dict[str, Tensor]:
    """Read a checkpoint's tensor file after comparing it with its size and hash in the manifest."""
    path = checkpoint / name
    try:
        size = os.lstat(path).st_size
        if size != stored.size:
            raise CheckpointError(f"{checkpoint}: {name} has {size:,} bytes instead of {stored.size:,}")
        if durable_files.content_hash(path) != stored.sha256:
            raise CheckpointError(f"{checkpoint}: {name} does not match its hash")
        return load_file(path)
    except OSError as error:
        raise CheckpointError(f"{checkpoint}: {name} cannot be read: {error.strerror or error}") from None
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"{checkpoint}: {name} is not a valid safetensors file: {printable_line(error)}"
        ) from None


def assemble(sharded: Mapping[str, ShardedTensor], files: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Assemble each tensor from its pieces, which must cover it exactly; if not, a ValueError names the tensor.

    Args:
        sharded: the sharded tensors by name, from the manifest.
        files: the content of the files that hold their pieces, by file name.
    """
    return {name: _assemble_one(name, tensor, files) for name, tensor in sharded.items()}


def _assemble_one(name: str, tensor: ShardedTensor, files: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
    pieces = [(piece, _content(name, piece, files)) for piece in tensor.pieces]
    boxes = [_box(piece, content) for piece, content in pieces]
    problem = f"the pieces of {printable_line(name)} do not form a tensor of shape {tuple(tensor.shape)}"
    # The right number of elements, all inside the tensor, and none twice: then nothing is missing. The first two are
    # checked before memory for the tensor is allocated, so that a forged shape cannot ask for more than was read.
    is_complete = sum(content.numel() for _, content in pieces) == prod(tensor.shape) and pieces
    # Pieces with a single offset are ranges of the flattened tensor.
    is_flat = all(len(piece.offsets) == 1 for piece, _ in pieces)
    shape = (prod(tensor.shape),) if is_flat else tensor.shape
    is_inside = all(len(box) == len(shape) for box in boxes) and all(
        side.stop <= size for box in boxes for side, size in zip(box, shape, strict=True)
    )
    if not is_complete or not is_inside:
        raise ValueError(problem)
    whole = torch.empty(shape, dtype=pieces[0][1].dtype)
    is_filled = torch.zeros(shape, dtype=torch.bool)
    for box, (_, content) in zip(boxes, pieces, strict=True):
        if content.dtype != whole.dtype:
            raise ValueError(f"the pieces of {printable_line(name)} have different dtypes")
        if is_filled[box].any():
            raise ValueError(problem)
        whole[box] = content
        is_filled[box] = True
    return whole.view(tensor.shape)


def _content(name: str, piece: ShardPiece, files: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
    content = files.get(piece.file, {}).get(name)
    if content is None or content.dim() != len(piece.offsets):
        raise ValueError(f"{piece.file} lacks its piece of {printable_line(name)}")
    return content


def _box(piece: ShardPiece, content: Tensor) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(piece.offsets, content.shape, strict=True))
