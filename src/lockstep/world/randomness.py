"""Randomness that is keyed, never sequential: the same key gives the same stream on any rank, at any time."""

import hashlib
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_NUMPY_SEED_BITS = (1 << 32) - 1

# What `np.random.seed` and `random.seed` come down to. A lane of every step is seeded, between kernels that leave
# nothing of Python in the processor's caches: there the way to them takes as long as they do.
_seed_numpy = np.random.mtrand._rand.seed
_python_stream = random._inst
_seed_python = super(random.Random, _python_stream).seed


def key_of(seed: int, *key: int | str) -> int:
    """A 63-bit number that depends on the seed and on every part of the key."""
    text = "\x1f".join([str(seed), *(f"{type(part).__name__}:{part}" for part in key)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def derived(key: int, number: int) -> int:
    """Another 63-bit key from a key and a number below 2⁶⁴ (splitmix64): cheap enough for every lane of every step."""
    mixed = key + number * 0x9E3779B97F4A7C15 & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return (mixed ^ mixed >> 31) >> 1


def stream(seed: int, *key: int | str) -> torch.Generator:
    """A generator of its own for one purpose: `stream(seed, "shuffle", epoch)`."""
    return torch.Generator().manual_seed(key_of(seed, *key))


def seed_streams(key: int) -> None:
    """Start torch's, numpy's and Python's global streams from a key: what any code that draws will draw from."""
    seed_cpu_streams(key)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(key)


def seed_cpu_streams(key: int) -> None:
    """The same without the GPU's stream, for what happens off it."""
    torch.default_generator.manual_seed(key)  # 50 times faster than torch.manual_seed
    try:
        _seed_numpy(key & _NUMPY_SEED_BITS)
    except TypeError:  # the program has given numpy another kind of generator
        np.random.seed(key & _NUMPY_SEED_BITS)
    _seed_python(key)
    _python_stream.gauss_next = None  # type: ignore[attr-defined]  # the second of a pair drawn before


class StreamStates(NamedTuple):
    """Where the global streams are: torch's, numpy's, Python's, and those of some GPUs."""

    torch_cpu: Tensor
    python: tuple[Any, ...]
    numpy: Any
    cuda: dict[int, Tensor]

    @classmethod
    def now(cls, gpus: Iterable[int] = ()) -> Self:
        return cls(
            torch.default_generator.get_state(),
            random.getstate(),
            np.random.get_state(legacy=False),
            {gpu: torch.cuda.get_rng_state(gpu) for gpu in gpus},
        )

    def put_back(self) -> None:
        torch.default_generator.set_state(self.torch_cpu)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        for gpu, state in self.cuda.items():
            torch.cuda.set_rng_state(state, gpu)


@contextmanager
def undisturbed_streams(*, cuda: bool = False) -> Iterator[None]:
    """Put the global streams back afterwards, with `cuda` the GPU's too: the caller draws on as if nothing had been."""
    is_on_gpu = cuda and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    states = StreamStates.now([torch.cuda.current_device()] if is_on_gpu else [])
    try:
        yield
    finally:
        states.put_back()
