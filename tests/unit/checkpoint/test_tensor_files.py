"""Sharded tensors are assembled from their pieces, which must cover them exactly."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.checkpoint.manifest import ShardedTensor, ShardPiece
from lockstep.checkpoint.tensor_files import assemble

Files = dict[str, dict[str, torch.Tensor]]


def shard(whole: torch.Tensor, cuts: list[list[int]]) -> tuple[ShardedTensor, Files]:
    """Cut a tensor into a grid of pieces, at these places in each dimension."""
    sides = [
        list(itertools.pairwise([0, *sorted(places), size])) for places, size in zip(cuts, whole.shape, strict=True)
    ]
    pieces, files = [], {}
    for number, box in enumerate(itertools.product(*sides)):
        pieces.append(ShardPiece(f"{number}.safetensors", tuple(start for start, _ in box)))
        files[pieces[-1].file] = {"w": whole[tuple(slice(*side) for side in box)]}
    return ShardedTensor(tuple(whole.shape), tuple(pieces)), files


@given(st.data())
def test_any_grid_of_pieces_makes_the_whole(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 5), max_size=3))
    cuts = [data.draw(st.lists(st.integers(0, size), max_size=3)) for size in shape]
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    sharded, files = shard(whole, cuts)
    assert torch.equal(assemble({"w": sharded}, files)["w"], whole)


WHOLE = torch.arange(8.0).view(4, 2)


def test_missing_repeated_and_misplaced_pieces_are_refused() -> None:
    sharded, files = shard(WHOLE, [[2], []])
    first, second = sharded.pieces
    for pieces in (
        (),
        (first,),
        (first, first),
        (first, second, second),
        (first, second._replace(offsets=(1, 0))),
        (first, second._replace(offsets=(3, 0))),
        (first, second._replace(offsets=(2, 1))),
    ):
        with pytest.raises(ValueError, match=r"the pieces of w do not form a tensor of shape \(4, 2\)"):
            assemble({"w": ShardedTensor((4, 2), pieces)}, files)


def test_a_missing_piece_or_another_dtype_is_refused() -> None:
    sharded, files = shard(WHOLE, [[2], []])
    with pytest.raises(ValueError, match=r"1\.safetensors lacks its piece of w"):
        assemble({"w": sharded}, {"0.safetensors": files["0.safetensors"]})
    files["1.safetensors"]["w"] = files["1.safetensors"]["w"].double()
    with pytest.raises(ValueError, match="the pieces of w have different dtypes"):
        assemble({"w": sharded}, files)


def test_a_forged_shape_allocates_nothing() -> None:
    for shape in ((2**48, 2), (2**20, 2**29)):
        sharded = ShardedTensor(shape, (ShardPiece("a", (0, 0)),))
        with pytest.raises(ValueError, match="do not form a tensor"):
            assemble({"w": sharded}, {"a": {"w": WHOLE}})
