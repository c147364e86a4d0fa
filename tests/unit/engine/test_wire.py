"""Numbers on their way: what two bytes each keep of them, whatever their size."""

import pytest
import torch
from torch import Tensor

from lockstep.engine.wire import AsTheyAre, Halves, Packing

HALVES = {"fp16": (Halves(torch.float16), 2.0**-11), "bf16": (Halves(torch.bfloat16), 2.0**-8)}


def there_and_back(packing: Packing, numbers: Tensor) -> Tensor:
    room = torch.empty(packing.num_bytes(numbers.numel()), dtype=torch.uint8)
    packing.pack(numbers, room)
    return packing.unpack(room)


def numbers(scale: float) -> Tensor:
    """Over three orders of magnitude."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1000, generator=generator) * torch.logspace(-3, 0, 1000) * scale


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("scale", [1e-30, 1e-9, 1.0, 3e5, 1e9, 1e30])
def test_no_number_is_too_large_or_too_small(name: str, scale: float) -> None:
    packing, precision = HALVES[name]
    sent = numbers(scale)
    torch.testing.assert_close(there_and_back(packing, sent), sent, rtol=precision, atol=1e-7 * scale)


@pytest.mark.parametrize("name", HALVES)
def test_two_bytes_a_number(name: str) -> None:
    packing, _ = HALVES[name]
    assert [packing.num_bytes(length) for length in (0, 1, 1000)] == [0, 6, 2004]


@pytest.mark.parametrize("packing", [Halves(torch.float16), Halves(torch.bfloat16), AsTheyAre(torch.float32)])
def test_zeros_stay_zeros_and_what_is_not_finite_stays_so(packing: Packing) -> None:
    assert there_and_back(packing, torch.zeros(3)).tolist() == [0.0] * 3
    assert there_and_back(packing, torch.zeros(0)).tolist() == []
    for spoilt in (torch.inf, -torch.inf, torch.nan):
        arrived = there_and_back(packing, torch.tensor([1.0, spoilt, -0.5]))
        assert arrived.isfinite().tolist() == [True, False, True]
        assert arrived[[0, 2]].tolist() == [1.0, -0.5]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_unpacked_numbers_lose_nothing(dtype: torch.dtype) -> None:
    sent = numbers(1.0).to(dtype)
    assert torch.equal(there_and_back(AsTheyAre(dtype), sent).to(dtype), sent)
