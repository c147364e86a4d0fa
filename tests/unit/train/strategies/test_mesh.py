"""The sizes of a mesh, and what needs no other rank."""

from math import prod
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import UserError
from lockstep.train.run import Run
from lockstep.train.step_options import StepOptions
from lockstep.train.strategies.mesh import mesh_sizes
from lockstep.train.strategies.strategy_factory import choose_strategy
from lockstep.world.world import World


@pytest.mark.parametrize(
    ("parallel", "num_ranks", "sizes"),
    [
        ("fsdp", 6, (1, 6, 1)),
        ({"shard": 2}, 8, (4, 2, 1)),
        ({"data": 2}, 8, (2, 4, 1)),
        ({"data": 2, "tensor": 2}, 8, (2, 2, 2)),
        ({"shard": 2, "tensor": 4}, 8, (1, 2, 4)),
        ({"tensor": 4}, 4, (1, 1, 4)),
        ({"data": 2, "shard": None, "tensor": None}, 2, (2, 1, 1)),
    ],
)
def test_a_missing_axis_is_computed(parallel: Any, num_ranks: int, sizes: tuple[int, int, int]) -> None:
    assert tuple(mesh_sizes(parallel, num_ranks)) == sizes
    assert prod(sizes) == num_ranks


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"data": 2, "shard": 2}, r"data 2 × shard 2 × tensor 1 = 4 processes, but 6 were started: make the product 6"),
        ({"data": 4}, r"data 4 × shard 1 × tensor 1 = 4 processes, but 6"),
        ({"tensor": 2}, r"data 1 × shard 1 × tensor 2 = 2 processes, but 6"),
        ({"shard": 0}, r"parallel.shard=0: expected a whole number greater than 0"),
        ({"shard": 2.0}, r"parallel.shard=2.0: expected a whole number"),
        ({"shards": 2}, r"no axis shards; did you mean shard\?"),
    ],
)
def test_sizes_that_do_not_multiply_to_the_ranks_show_the_arithmetic(parallel: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        mesh_sizes(parallel, 6)


def test_ranks_of_a_tensor_group_share_a_data_rank() -> None:
    plan = {"tensor_plan": {"*": "column"}, "determinism": "fast"}
    for rank in range(8):
        options = StepOptions(parallel={"shard": 2, "tensor": 2}, **plan)  # type: ignore[arg-type]
        strategy = choose_strategy(World(rank=rank, size=8), options).strategy
        assert (strategy.data_world.rank, strategy.data_world.size) == (rank // 2, 4)
        assert strategy.name == "{data: 2, shard: 2, tensor: 2}"


def test_one_process_is_a_mesh_too() -> None:
    run = Run(None, World(), parallel="fsdp", determinism="fast")
    model = run.prepare(nn.Linear(3, 2))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    dataset = torch.utils.data.TensorDataset(torch.ones(8, 3))
    for step in run.steps(run.loader(dataset, 4, lanes=2), steps=2):
        step.accumulate(lambda model, batch: (model(*batch).sum(), 2), model)
        step.update(optimizer)
    assert run.step == 2
