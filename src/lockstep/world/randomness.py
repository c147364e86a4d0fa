"""Randomness that is keyed, never sequential: the same key gives the same stream on any rank, at any time."""

import hashlib

import torch


def key_of(seed: int, *key: int | str) -> int:
    """A 63-bit number that depends on the seed and on every part of the key."""
    text = "\x1f".join([str(seed), *(f"{type(part).__name__}:{part}" for part in key)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def stream(seed: int, *key: int | str) -> torch.Generator:
    """A generator of its own for one purpose: `stream(seed, "shuffle", epoch)`."""
    return torch.Generator().manual_seed(key_of(seed, *key))
