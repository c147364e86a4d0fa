import torch

from lockstep.world.randomness import key_of, stream


def test_a_key_names_one_stream() -> None:
    first, again = (torch.rand(4, generator=stream(7, "order", 3)) for _ in range(2))
    assert torch.equal(first, again)


def test_every_part_of_the_key_matters() -> None:
    keys = [key_of(7), key_of(8), key_of(7, 1), key_of(7, "1"), key_of(7, 1, 2), key_of(7, 12), key_of(71, 2)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**63 for key in keys)
