"""Keyed random numbers: the same key gives the same stream on any rank, at any time; nothing is sequential."""

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_NUMPY_SEED_BITS = (1 << 32) - 1


def key_of(seed: int, *key: int | str) -> int:
    """A 63-bit number that depends on the seed and on every part of the key."""
    text = "\x1f".join([str(seed), *(f"{type(part).__name__}:{part}" for part in key)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def derive_key(key: int, number: int) -> int:
    """Another 63-bit key from a key and a number below 2⁶⁴: cheap enough for every lane of every step."""
    return splitmix64(key, number) >> 1


def splitmix64(seed: int, number: int) -> int:
    """The 64-bit output of the splitmix64 generator after `number` steps from a seed: a good hash of both."""
    mixed = (seed + number * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def keyed_generator(seed: int, *key: int | str) -> torch.Generator:
    """A generator for one purpose, seeded by its key: `keyed_generator(seed, "shuffle", epoch)`.

    The same seed and key give the same numbers, on any rank and at any time.
    """
    return torch.Generator().manual_seed(key_of(seed, *key))


def seed_rngs(key: int) -> None:
    """Seed the global generators of torch (CPU and GPU), numpy and `random` with a key."""
    seed_cpu_rngs(key)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(key)


def seed_cpu_rngs(key: int) -> None:
    """Seed the global generators of torch's CPU, numpy and `random`, but not the GPU's."""
    torch.default_generator.manual_seed(key)  # 50 times faster than torch.manual_seed
    try:
        _seed_numpy(key & _NUMPY_SEED_BITS)
    except TypeError:  # the program has replaced numpy's generator by another kind
        np.random.seed(key & _NUMPY_SEED_BITS)
    _seed_python(key)


# [Note: fast seeding] Every lane of every step seeds numpy and `random`, right after kernels that have evicted Python's
# code from the processor's caches. Then the public functions take twice as long as the seeding itself, so the two
# functions below find the objects that those call. Both names are private (last seen in Python 3.11–3.12 and numpy
# 2.4); without them the public functions are used, which do the same more slowly.


def _find_numpy_seed() -> Callable[[int], None]:
    """The method that `np.random.seed` calls."""
    state = getattr(getattr(np.random, "mtrand", None), "_rand", None)
    return np.random.seed if state is None else state.seed


def _find_python_seed() -> Callable[[int], None]:
    """What `random.seed` does with an integer."""
    generator = getattr(random, "_inst", None)
    if not isinstance(generator, random.Random):
        return random.seed
    seed_state = super(random.Random, generator).seed

    def seed(key: int) -> None:
        seed_state(key)
        generator.gauss_next = None  # type: ignore[attr-defined]  # the second number of a pair drawn earlier

    return seed


_seed_numpy = _find_numpy_seed()
_seed_python = _find_python_seed()


class RngStates(NamedTuple):
    """The states of the global generators: torch's, numpy's and Python's, and those of some GPUs."""

    torch_cpu: Tensor
    python: tuple[Any, ...]
    numpy: Any
    cuda: dict[int, Tensor]

    @classmethod
    def now(cls, gpus: Iterable[int] = ()) -> Self:
        """The current states, with those of the GPUs of these numbers."""
        return cls(
            torch.default_generator.get_state(),
            random.getstate(),
            np.random.get_state(legacy=False),
            {gpu: torch.cuda.get_rng_state(gpu) for gpu in gpus},
        )

    def put_back(self) -> None:
        """Set the global generators to these states."""
        torch.default_generator.set_state(self.torch_cpu)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        for gpu, state in self.cuda.items():
            torch.cuda.set_rng_state(state, gpu)


@contextmanager
def preserve_rng_states(*, cuda: bool = False) -> Iterator[None]:
    """Restore the global generators after the block; with `cuda`, also that of the current GPU."""
    is_on_gpu = cuda and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    states = RngStates.now([torch.cuda.current_device()] if is_on_gpu else [])
    try:
        yield
    finally:
        states.put_back()
