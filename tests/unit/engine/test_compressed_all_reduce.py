"""Encodings of compressed messages: what two bytes keep of a number, whatever its size."""

import pytest
import torch
from torch import Tensor

from lockstep.engine.compressed_all_reduce import Encoding, ScaledHalf, Uncompressed

HALVES = {"fp16": (ScaledHalf(torch.float16), 2.0**-11), "bf16": (ScaledHalf(torch.bfloat16), 2.0**-8)}


def there_and_back(encoding: Encoding, numbers: Tensor) -> Tensor:
    message = torch.empty(encoding.num_bytes(numbers.numel()), dtype=torch.uint8)
    encoding.encode(numbers, message)
    return encoding.decode(message)


def numbers(scale: float) -> Tensor:
    """Return numbers over three orders of magnitude."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1000, generator=generator) * torch.logspace(-3, 0, 1000) * scale


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("scale", [1e-30, 1e-9, 1.0, 3e5, 1e9, 1e30])
def test_numbers_of_any_size_keep_their_precision(name: str, scale: float) -> None:
    encoding, precision = HALVES[name]
    sent = numbers(scale)
    torch.testing.assert_close(there_and_back(encoding, sent), sent, rtol=precision, atol=1e-7 * scale)


@pytest.mark.parametrize("name", HALVES)
def test_each_number_takes_two_bytes(name: str) -> None:
    encoding, _ = HALVES[name]
    assert [encoding.num_bytes(length) for length in (0, 1, 1000)] == [0, 6, 2004]


@pytest.mark.parametrize(
    "encoding", [ScaledHalf(torch.float16), ScaledHalf(torch.bfloat16), Uncompressed(torch.float32)]
)
def test_zeros_stay_zeros_and_nonfinite_numbers_stay_nonfinite(encoding: Encoding) -> None:
    assert there_and_back(encoding, torch.zeros(3)).tolist() == [0.0] * 3
    assert there_and_back(encoding, torch.zeros(0)).tolist() == []
    for spoilt in (torch.inf, -torch.inf, torch.nan):
        arrived = there_and_back(encoding, torch.tensor([1.0, spoilt, -0.5]))
        assert arrived.isfinite().tolist() == [True, False, True]
        assert arrived[[0, 2]].tolist() == [1.0, -0.5]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_uncompressed_numbers_lose_nothing(dtype: torch.dtype) -> None:
    sent = numbers(1.0).to(dtype)
    assert torch.equal(there_and_back(Uncompressed(dtype), sent).to(dtype), sent)
