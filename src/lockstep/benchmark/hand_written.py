"""The loop that all others are compared with: plain torch, with DistributedDataParallel on several processes."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from lockstep.benchmark.loop import SEED, Loop, PlainLoop, Rows, Setting, as_they_are, endless, make_optimizer


def as_fast_as_it_gets(setting: Setting) -> Loop:
    return _make(setting, shuffled_rows(setting))


def with_dataloader(setting: Setting) -> Loop:
    """The same with what most people take their batches from, as the peers do."""
    world, rows = setting.world, Rows(setting.work.data.tensors)
    if world.size == 1:
        loader = DataLoader(rows, setting.batch, shuffle=True, collate_fn=as_they_are)
        return _make(setting, endless(loader))
    sampler: DistributedSampler[Any] = DistributedSampler(rows, world.size, world.rank, seed=SEED)
    loader = DataLoader(rows, setting.share, sampler=sampler, collate_fn=as_they_are)
    return _make(setting, endless(loader, sampler.set_epoch))


def _make(setting: Setting, batches: Iterator[Sequence[Tensor]]) -> Loop:
    model = setting.work.make_model().to(setting.world.device)
    alone = setting.world.size == 1
    called = model if alone else DistributedDataParallel(model, gradient_as_bucket_view=True)
    return PlainLoop(model, called, make_optimizer(model.parameters()), batches, setting.work.loss_sum)


def shuffled_rows(setting: Setting) -> Iterator[list[Tensor]]:
    """This process's part of every batch, by one operation a tensor; all processes shuffle alike."""
    tensors = setting.work.data.tensors
    generator = torch.Generator().manual_seed(SEED)
    while True:
        order = torch.randperm(len(tensors[0]), generator=generator).to(tensors[0].device)
        for start in range(setting.world.rank * setting.share, len(order), setting.batch):
            rows = order[start : start + setting.share]
            yield [tensor.index_select(0, rows) for tensor in tensors]
