"""The promise of activation checkpointing: it keeps less for the backward pass and changes no bit."""

from typing import Any

import pytest
import torch

from lockstep.testing import ranks
from lockstep.world.world import World
from tests.contracts.checkpointed_blocks import sharded_gradients, train_blocks
from tests.contracts.workloads import Trained, train


def assert_same(recomputed: Trained, kept: Trained) -> None:
    assert not [name for name in kept.tensors if recomputed.tensors.get(name) != kept.tensors[name]]
    assert recomputed == kept


def both(world: World, lanes: int, choice: dict[str, Any], **options: Any) -> tuple[Trained, Trained]:
    return train_blocks(world, lanes, **options), train_blocks(world, lanes, activation_checkpointing=choice, **options)


def test_any_number_of_processes_gives_the_same_bits() -> None:
    alone = train_blocks(World(), 4)
    for num_ranks in (1, 2, 4):
        for recomputed in ranks(num_ranks).run(train_blocks, 4, activation_checkpointing={}):
            assert_same(recomputed, alone)


@pytest.mark.parametrize("choice", [{"every": 2}, {"classes": ["Linear", "Block"]}], ids=str)
def test_any_choice_of_modules_gives_the_same_bits_nested_ones_too(choice: dict[str, Any]) -> None:
    kept, recomputed = both(World(), 4, choice)
    assert_same(recomputed, kept)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_same_bits_under_autocast(precision: str) -> None:
    kept, recomputed = both(World(), 4, {}, precision=precision)
    assert_same(recomputed, kept)
    assert kept.digest != train_blocks(World(), 4).digest


def test_the_same_bits_with_a_single_lane_and_in_fast_mode() -> None:
    kept, recomputed = both(World(), 1, {})
    assert_same(recomputed, kept)
    kept, recomputed = ranks(2).run(both, 4, {}, determinism="fast")[0]
    assert_same(recomputed, kept)


def test_the_same_bits_of_a_transformer_with_clipping_under_zero() -> None:
    loader = {"global_batch": 40, "lanes": 8}
    kept = train(World(), "gpt", 4, loader, clip_norm=0.05)
    options = {"clip_norm": 0.05, "activation_checkpointing": {}, "parallel": "zero"}
    assert_same(ranks(2).run(train, "gpt", 4, loader, **options)[0], kept)


def test_the_same_bits_of_a_model_that_fsdp_shards() -> None:
    for kept, before, after in ranks(2).run(sharded_gradients):
        assert len(kept) == len(before) == len(after) > 0
        assert all(map(torch.equal, kept, before))
        assert all(map(torch.equal, kept, after))
