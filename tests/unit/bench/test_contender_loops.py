"""The loops that are timed train correctly, on the same samples."""

import torch

from lockstep.bench.bench_models import build_workload
from lockstep.bench.contender_loops import LoopSetup, hand_written_loop, shuffled_batches
from lockstep.world.world import World

WORK = build_workload("tiny", 64, 0.1)
STEPS = 5  # more than an epoch


def test_the_hand_written_loop_matches_a_textbook_loop() -> None:
    setup = LoopSetup(WORK, World(), 16, None)
    loop = hand_written_loop(setup)
    loop.advance(2)
    loop.advance(STEPS - 2)

    model = WORK.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _, (inputs, labels) in zip(range(STEPS), shuffled_batches(setup), strict=False):
        loss = torch.nn.CrossEntropyLoss(reduction="sum")(model(inputs), labels) / 16
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weights = loop.weights()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_processes_share_the_batches_of_one() -> None:
    alone = shuffled_batches(LoopSetup(WORK, World(), 16, None))
    shared = [shuffled_batches(LoopSetup(WORK, World(rank=rank, size=2), 16, None)) for rank in (0, 1)]
    seen = []
    for _ in range(4):
        whole, *parts = next(alone), *map(next, shared)
        assert all(len(part[0]) == 8 for part in parts)
        assert all(torch.equal(torch.cat(halves), own) for own, *halves in zip(whole, *parts, strict=True))
        seen.append(whole[0])
    epoch = torch.cat(seen)
    assert torch.equal(epoch.sort(0).values, WORK.data.tensors[0].sort(0).values), "each sample once"
    assert not torch.equal(epoch, WORK.data.tensors[0]), "shuffled"
    assert not torch.equal(next(alone)[0], seen[0]), "and in another order in the next epoch"
