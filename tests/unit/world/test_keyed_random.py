"""Keyed random numbers: seeding, and restoring the global generators."""

import random

import numpy as np
import torch

from lockstep.world.keyed_random import key_of, keyed_generator, preserve_rng_states, seed_cpu_rngs


def test_a_key_names_one_stream() -> None:
    first, again = (torch.rand(4, generator=keyed_generator(7, "order", 3)) for _ in range(2))
    assert torch.equal(first, again)


def test_every_part_of_the_key_matters() -> None:
    keys = [key_of(7), key_of(8), key_of(7, 1), key_of(7, "1"), key_of(7, 1, 2), key_of(7, 12), key_of(71, 2)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**63 for key in keys)


def drawn() -> list[float]:
    """Return numbers from every generator; odd counts, because normal numbers are drawn in pairs."""
    return [
        *(random.random() for _ in range(3)),
        *(random.gauss(0.0, 1.0) for _ in range(3)),
        *np.random.random(3),
        *np.random.standard_normal(3),
        *torch.rand(3).tolist(),
    ]


def test_seeding_equals_the_public_seed_functions() -> None:
    key = key_of(7, "lane")
    with preserve_rng_states():
        torch.manual_seed(key)
        np.random.seed(key & 0xFFFFFFFF)
        random.seed(key)
        expected = drawn()
        for _ in range(2):  # the second time, half a pair is left over from the first
            seed_cpu_rngs(key)
            assert drawn() == expected


def test_numpy_with_another_bit_generator() -> None:
    with preserve_rng_states():
        own = np.random.get_bit_generator()
        np.random.set_bit_generator(np.random.PCG64(1))
        try:
            seed_cpu_rngs(5)
            first = np.random.random(4).tolist()
            seed_cpu_rngs(5)
            assert np.random.random(4).tolist() == first
        finally:
            np.random.set_bit_generator(own)
