"""Are all these numbers finite?"""

import pytest
import torch

from lockstep.engine.finite import all_finite

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_bad_number_anywhere_is_found(dtype: torch.dtype, bad: float) -> None:
    tensors = [torch.randn(3, 5).to(dtype).t(), torch.zeros(0, dtype=dtype), torch.ones((), dtype=dtype)]
    copies = [tensor.clone() for tensor in tensors]
    assert all_finite(tensors)
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True)), "looking changes nothing"
    tensors[0][2, 1] = bad
    assert not all_finite(tensors)


def test_types_may_be_mixed_and_any_may_have_it() -> None:
    good = [torch.ones(2, dtype=dtype) for dtype in TYPES]
    assert all_finite(good)
    for place in range(len(TYPES)):
        bad = [tensor.clone() for tensor in good]
        bad[place][1] = torch.nan
        assert not all_finite(bad)


def test_sparse_gradients_too() -> None:
    layer = torch.nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    gradient = layer.weight.grad
    assert gradient is not None
    assert all_finite([gradient])
    assert not all_finite([gradient * torch.inf])


def test_nothing_is_finite() -> None:
    assert all_finite([])


def test_a_tensor_that_is_only_marked_as_conjugated() -> None:
    lazy = torch.ones(2, dtype=torch.complex64).conj()
    assert lazy.is_conj()
    assert all_finite([lazy])
    assert not all_finite([lazy.mul(torch.nan).conj()])
