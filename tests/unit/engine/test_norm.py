"""The norm by blocks: right, and the same for whoever holds only some of the blocks."""

import pytest
import torch

from lockstep.engine.norm import block_squares, global_norm, scale_to_norm
from lockstep.errors import UserError


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator) for shape in ((3,), (40, 70), (1024,), (5, 2048), (0,))]


def test_it_is_the_norm_of_all_of_them() -> None:
    expected = torch.cat([gradient.flatten().double() for gradient in gradients()]).norm()
    assert global_norm(gradients()).item() == pytest.approx(expected.item(), rel=1e-6)
    assert global_norm([]) == 0


def test_blocks_can_be_computed_apart() -> None:
    tensor = torch.randn(9 * 1024 + 17, generator=torch.Generator().manual_seed(0))
    whole = block_squares(tensor)
    assert len(whole) == 10
    for cut in range(1024, 9 * 1024, 1024):
        apart = torch.cat([block_squares(tensor[:cut]), block_squares(tensor[cut:])])
        assert torch.equal(apart, whole)


def test_clipping_scales_what_is_too_long_and_leaves_the_rest() -> None:
    long, short = gradients(), gradients()
    scale_to_norm(long, global_norm(long), 0.5)
    assert global_norm(long).item() == pytest.approx(0.5, rel=1e-5)
    scale_to_norm(short, global_norm(short), 1e6)
    assert all(torch.equal(a, b) for a, b in zip(short, gradients(), strict=True))


def test_low_precision_is_summed_in_high() -> None:
    many = torch.full((4096,), 0.5, dtype=torch.bfloat16)
    assert global_norm([many]).item() == pytest.approx(32.0)


def test_sparse_gradients_are_refused_in_words() -> None:
    with pytest.raises(UserError, match="clip_norm cannot clip sparse gradients"):
        global_norm([torch.ones(2, 2).to_sparse()])


def test_a_mere_number_is_clipped_to_the_bits_that_it_has_in_a_list() -> None:
    for value in torch.randn(100, generator=torch.Generator().manual_seed(0)):
        number, listed = value.clone(), value.clone().view(1)
        scale_to_norm([number, listed], torch.tensor(1.7, dtype=torch.float64), 0.3)
        assert number == listed[0]
