"""Scaling, the norm by blocks, clipping and the finite check: right, and the same bits in parts."""

import pytest
import torch

from lockstep.engine.gradient_math import all_finite, block_squares, global_norm, scale_gradients, scale_to_norm
from lockstep.errors import UserError

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator) for shape in ((3,), (40, 70), (1024,), (5, 2048), (0,))]


def test_the_global_norm_is_over_all_tensors() -> None:
    expected = torch.cat([gradient.flatten().double() for gradient in gradients()]).norm()
    assert global_norm(gradients()).item() == pytest.approx(expected.item(), rel=1e-6)
    assert global_norm([]) == 0


def test_blocks_can_be_computed_separately() -> None:
    tensor = torch.randn(9 * 1024 + 17, generator=torch.Generator().manual_seed(0))
    whole = block_squares(tensor)
    assert len(whole) == 10
    for cut in range(1024, 9 * 1024, 1024):
        apart = torch.cat([block_squares(tensor[:cut]), block_squares(tensor[cut:])])
        assert torch.equal(apart, whole)


def test_clipping_scales_only_gradients_above_the_maximum() -> None:
    long, short = gradients(), gradients()
    scale_to_norm(long, global_norm(long), 0.5)
    assert global_norm(long).item() == pytest.approx(0.5, rel=1e-5)
    scale_to_norm(short, global_norm(short), 1e6)
    assert all(torch.equal(a, b) for a, b in zip(short, gradients(), strict=True))


def test_low_precision_is_accumulated_in_high_precision() -> None:
    many = torch.full((4096,), 0.5, dtype=torch.bfloat16)
    assert global_norm([many]).item() == pytest.approx(32.0)


def test_clipping_refuses_sparse_gradients() -> None:
    with pytest.raises(UserError, match="clip_norm cannot clip sparse gradients"):
        global_norm([torch.ones(2, 2).to_sparse()])


def test_a_scalar_is_clipped_to_the_same_bits_as_a_vector() -> None:
    for value in torch.randn(100, generator=torch.Generator().manual_seed(0)):
        number, listed = value.clone(), value.clone().view(1)
        scale_to_norm([number, listed], torch.tensor(1.7, dtype=torch.float64), 0.3)
        assert number == listed[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_scaling_has_the_same_bits_tensor_by_tensor_and_in_one_buffer(dtype: torch.dtype) -> None:
    values = torch.randn(200, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole, scale = values.clone(), torch.tensor(1 / 37, dtype=torch.float64)
    scale_gradients([whole], scale)
    pieces = [values[:3].clone(), values[3].clone(), *(value.clone() for value in values[4:])]  # many of no dimension
    scale_gradients(pieces, scale)
    assert torch.equal(torch.cat([piece.reshape(-1) for piece in pieces]), whole)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_nonfinite_number_anywhere_is_found(dtype: torch.dtype, bad: float) -> None:
    tensors = [torch.randn(3, 5).to(dtype).t(), torch.zeros(0, dtype=dtype), torch.ones((), dtype=dtype)]
    copies = [tensor.clone() for tensor in tensors]
    assert all_finite(tensors)
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True)), "looking changes nothing"
    tensors[0][2, 1] = bad
    assert not all_finite(tensors)


def test_dtypes_may_be_mixed() -> None:
    good = [torch.ones(2, dtype=dtype) for dtype in TYPES]
    assert all_finite(good)
    for place in range(len(TYPES)):
        bad = [tensor.clone() for tensor in good]
        bad[place][1] = torch.nan
        assert not all_finite(bad)


def test_sparse_gradients_are_checked_too() -> None:
    layer = torch.nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    gradient = layer.weight.grad
    assert gradient is not None
    assert all_finite([gradient])
    assert not all_finite([gradient * torch.inf])


def test_an_empty_list_is_finite() -> None:
    assert all_finite([])


def test_lazily_conjugated_tensors_are_checked_too() -> None:
    lazy = torch.ones(2, dtype=torch.complex64).conj()
    assert lazy.is_conj()
    assert all_finite([lazy])
    assert not all_finite([lazy.mul(torch.nan).conj()])
