"""Edge cases of meshes: what is refused before training, failures during training, and control flags."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lockstep.checkpoint.checkpoint_store import latest_checkpoint, load_weights
from lockstep.data.lane_loader import LaneLoader
from lockstep.engine.loss_table import STOP
from lockstep.engine.stand_in_gradient import GradientInsideLanes
from lockstep.errors import Stopped, UserError
from lockstep.events.jsonl import read_jsonl
from lockstep.events.run_folder import RunFolder
from lockstep.testing import ranks
from lockstep.train.optim.nonfinite import NonFiniteError
from lockstep.train.run import Run
from lockstep.train.step_options import StepOptions
from lockstep.train.trainer import Trainer
from lockstep.world.dtensor import is_dtensor
from lockstep.world.world import World

PLAN = {"0": "column", "2": "row"}
HALVES = {"tensor": 2, "data": 1}


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def data(count: int = 48) -> TensorDataset:
    return TensorDataset(torch.randn(count, 6, generator=torch.Generator().manual_seed(0)), torch.arange(count) % 4)


def loss(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def train(world: World, **changes: Any) -> str:
    """Train, and return the error message, or the digest."""
    made = {"model": small, "optimizer": torch.optim.AdamW, "data": data, "loader": {"lanes": 4}} | changes
    options = {name: value for name, value in changes.items() if name in StepOptions.names()}
    try:
        run = Run(None, world, **{"parallel": "fsdp", "determinism": "fast"} | options)
        model = run.prepare(made["model"]())
        optimizer = run.optimizer(model, lambda params: made["optimizer"](params, lr=1e-2))
        source = made["data"]()
        batch = None if isinstance(source, DataLoader) else 8
        loader = source(world) if callable(source) else run.loader(source, batch, **made["loader"])
        for step in run.steps(loader, steps=2, finish=False):
            step.accumulate(loss, model)
            step.update(optimizer)
        return run.finish()
    except UserError as error:
        return str(error)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    return model


class WithNumber(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 4)
        self.number = nn.Parameter(torch.tensor(1.0))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(6, 2)


class Own(torch.optim.AdamW):
    pass


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from data(44)  # half a batch more than five


def channels_last() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)


def of_all_ranks(world: World) -> LaneLoader:
    return LaneLoader(data(), 8, world, lanes=4)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "lockstep mode": ({"determinism": "lockstep"}, "parallel=fsdp sums gradients in an order that depends on"),
    "an axis": ({"parallel": {"date": 2}}, "parallel has no axis date; did you mean data?"),
    "the product": (
        {"parallel": {"data": 2, "shard": 2}},
        "parallel: data 2 × shard 2 × tensor 1 = 4 processes, but 2 were started",
    ),
    "an optimizer": (
        {"optimizer": Own},
        "parallel=fsdp runs an optimizer on parts of parameters, and Own is not known",
    ),
    "a class": ({"fsdp": {"wrap": ["Block"]}}, "the model has no module of a class 'Block'; it has Linear, Sequential"),
    "a tied unit": (
        {"model": tied, "fsdp": {"wrap": ["Linear"]}},
        "fsdp.wrap: 2 (Linear) shares weight with a module outside",
    ),
    "an option": ({"fsdp": {"cpu_ofload": True}}, "fsdp has no option cpu_ofload; did you mean cpu_offload?"),
    "a number": ({"model": WithNumber}, "number is a scalar, which a mesh cannot shard"),
    "types": (
        {"model": lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4).bfloat16())},
        "0.bias (float32) and 1.bias (bfloat16) would be gathered together, but have different dtypes",
    ),
    "a memory format": ({"model": channels_last}, "0.weight is not contiguous (channels_last?)"),
    "lanes per rank": (
        {"loader": {"lanes": 4, "lanes_per_rank": [3, 1]}},
        "lanes=4 on 2 makes 3, 1: use a multiple of 2",
    ),
    "an empty lane": (
        {"data": lambda: data(42), "loader": {"lanes": 4, "tail": "short"}},
        "tail=short can leave lanes without samples",
    ),
    "a stream's end": ({"data": Streamed, "loader": {"lanes": 4, "tail": "short"}}, "tail=short can leave lanes"),
    "compression": ({"compression": "bf16"}, "parallel=fsdp shards them"),
    "uneven inputs": (
        {
            "data": lambda: DataLoader(data(), batch_size=4, sampler=list(range(40))),
            "loader": {"uneven": "join"},
        },
        "under parallel=fsdp all ranks run the model together",
    ),
    "no plan": ({"parallel": HALVES}, "tensor=2 needs a tensor_plan"),
    "a style": ({"tensor_plan": {"0": "colum"}}, "tensor_plan: 0: 'colum' is not one of column, column_gathered"),
    "a pattern": (
        {"tensor_plan": {"1.*": "column"}},
        "tensor_plan: '1.*' matches no module of the model; similar names are 1",
    ),
    "a module": ({"tensor_plan": {"1": "row"}}, "tensor_plan: 1 is a Tanh, and row is for a Linear or Embedding"),
    "a norm": ({"tensor_plan": {"0": "sequence"}}, "tensor_plan: 0 is a Linear, and sequence is for a LayerNorm or"),
    "a tied layer": ({"model": tied, "tensor_plan": {"0": "row"}}, "0 shares its weight with another module"),
    "attention": (
        {"model": Attention, "tensor_plan": {"*.out_proj": "row"}},
        "attend.out_proj is inside a MultiheadAttention",
    ),
    "features": (
        {
            "parallel": HALVES,
            "tensor_plan": {"0": "row"},
            "model": lambda: nn.Sequential(nn.Linear(5, 4)),
        },
        "0 has 5 in features, which 2 ranks cannot split equally",
    ),
    "a loader": (
        {"parallel": HALVES, "tensor_plan": PLAN, "data": lambda: of_all_ranks},
        "the loader was made for 2 processes, but 1 have their own samples: make it with run.loader",
    ),
    "an order": (
        {
            "parallel": HALVES,
            "tensor_plan": PLAN,
            "data": lambda: DataLoader(data(), batch_size=4, sampler=list(range(40))),
            "loader": {},
        },
        "each group of 2 processes must see the same samples, but this DataLoader orders its own",
    ),
}


def refusals(world: World) -> dict[str, str]:
    return {name: train(world, **case) for name, (case, _) in REFUSED.items()}


def test_impossible_meshes_are_refused_before_training() -> None:
    for messages in ranks(2).run(refusals):
        assert [
            (name, messages[name]) for name, (_, expected) in REFUSED.items() if expected not in messages[name]
        ] == []


def left_early(world: World) -> str:
    run = Run(None, world, parallel="fsdp", determinism="fast")
    model = run.prepare(small())
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    with pytest.raises(UserError) as caught:
        for step in run.steps(run.loader(data(), 8, lanes=4), steps=2, finish=False):
            for batch in step.lanes:
                step.backward(*loss(model, batch))
                break
            step.accumulate(loss, model)
            step.update(optimizer)
    return str(caught.value)


def shared_in(world: World) -> list[bool]:
    """Return after which of this rank's lanes gradients have been reduced."""
    run = Run(None, world, parallel="fsdp", determinism="fast")
    model = run.prepare(small())
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    shared = []
    for step in run.steps(run.loader(data(), 8, lanes=4), steps=2, finish=False):
        for batch in step.lanes:
            step.backward(*loss(model, batch))
            shared.append(not any(isinstance(p.grad, GradientInsideLanes | None) for p in model.parameters()))
        step.update(optimizer)
    return shared


def weights_at_first(world: World, **options: Any) -> set[float]:
    """Return the whole state of a model that every rank has initialised differently."""
    run = Run(None, world, determinism="fast", **options)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).float()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(world.rank)
    run.prepare(model)
    return {number for tensor in run.state().values() for number in tensor.flatten().tolist()}


class Sometimes(nn.Module):
    """A layer that only some lanes use: in the first batch, only those of rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.first(inputs)
        return self.second(hidden) if inputs[0, 0] > 1 else hidden


def train_sometimes(world: World, **options: Any) -> list[float]:
    inputs = torch.zeros(16, 6)
    inputs[4:8] = 2.0
    run = Run(None, world, determinism="fast", **options)
    model = run.prepare(Sometimes())
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    loader = run.loader(TensorDataset(inputs, torch.arange(16) % 4), 8, lanes=2, shuffle=False)
    losses = []
    for step in run.steps(loader, steps=2, finish=False):
        step.accumulate(loss, model)
        step.update(optimizer)
        losses.append(step.loss)
    return losses


def at_the_edges(world: World) -> tuple[str, list[bool], list[float]]:
    return left_early(world), shared_in(world), train_sometimes(world, parallel="fsdp", find_unused_parameters=True)


def test_lanes_left_early_shared_parameters_and_unused_layers() -> None:
    alone = train_sometimes(World())
    for message, shared, losses in ranks(2).run(at_the_edges):
        assert shared == [False, True] * 2, "in a rank's last lane alone"
        assert "the previous pass over the lanes was left early" in message
        assert losses == pytest.approx(alone, rel=1e-5)  # single precision, a few sums


@pytest.mark.parametrize("options", [{"parallel": "fsdp"}, {"parallel": HALVES, "tensor_plan": PLAN}])
def test_all_ranks_start_with_the_weights_of_rank_0(options: dict[str, Any]) -> None:
    assert ranks(2).run(weights_at_first, **options) == [{0.0}, {0.0}]


def poisoned(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    """Where a sample is marked with a label of -1, gradients are infinite on their way back, and the loss is not."""
    inputs, labels = batch
    scores = model(inputs)
    if (labels < 0).any():
        scores.register_hook(lambda gradient: gradient * torch.inf)
    return F.cross_entropy(scores, labels.abs(), reduction="sum"), len(labels)


def train_badly(world: World, spoil: str, **options: Any) -> tuple[list[tuple[Any, ...]], str]:
    run = Run(None, world, sinks=[], determinism="fast", **options)
    model = run.prepare(small())
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    average = run.ema(model)
    dataset = data()
    if spoil == "loss":
        dataset.tensors[0][13] = torch.nan
    else:
        dataset.tensors[1][13] = -1
    seen: list[tuple[Any, ...]] = []
    try:
        for step in run.steps(run.loader(dataset, 8, lanes=4, shuffle=False), steps=3, finish=False):
            before = {name: tensor.clone() for name, tensor in run.state().items()}
            step.accumulate(poisoned, model)
            step.update(optimizer)
            after = run.state()
            is_same = all(torch.equal(after[name], tensor) for name, tensor in before.items())
            seen.append((step.number, step.was_skipped, is_same, average.num_updates, run.loss_scale))
    except NonFiniteError as error:
        return seen, str(error)
    finally:
        run.close(abandon=True)
    return seen, ""


def all_bad(world: World, **options: Any) -> list[Any]:
    return [
        train_badly(world, "loss", **options),
        train_badly(world, "gradient", **options),
        train_badly(world, "gradient", on_nonfinite="skip", **options),
        train_badly(world, "gradient", precision="fp16", **options),
    ]


@pytest.mark.parametrize(("num_ranks", "parallel"), [(2, "fsdp"), (4, {"shard": 2, "tensor": 2})])
def test_all_ranks_agree_on_what_is_not_finite(num_ranks: int, parallel: Any) -> None:
    plan = {"tensor_plan": PLAN} if num_ranks == 4 else {}
    results = ranks(num_ranks).run(all_bad, parallel=parallel, **plan)
    assert all(result == results[0] for result in results)
    in_the_loss, in_the_gradient, skipped, scaled = results[0]
    assert "step 2: the loss is not finite in lane 2 (rank 1)" in in_the_loss[1]
    assert "step 2: the gradient is not finite although every lane's loss is" in in_the_gradient[1]
    assert "the gradient of 0.weight, 0.bias, 2.weight, 2.bias" in in_the_gradient[1]
    assert [entry[:4] for entry in skipped[0]] == [
        (1, False, False, 1),
        (2, True, True, 1),
        (2, False, False, 2),
        (3, False, False, 3),
    ]
    assert [entry[:2] for entry in scaled[0]] == [(1, False), (2, True), (2, False), (3, False)]
    assert scaled[0][1][4] == scaled[0][0][4] / 2


def stop_from(world: World, asking: list[int], folder: Path) -> int:
    """Let these ranks ask to stop in the middle of a step."""
    run = Run(folder, world, sinks=[], determinism="fast", parallel=HALVES, tensor_plan=PLAN)
    model = run.prepare(small())
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    with pytest.raises(Stopped):
        for step in run.steps(run.loader(data(), 8, lanes=1), steps=6, finish=False):
            step.accumulate(loss, model)
            step.update(optimizer)
            if world.rank in asking and step.number == 2:
                run._loop._flags.request(STOP)
    run.close()
    return run.step


@pytest.mark.parametrize("asking", [[1], [0, 1]])
def test_control_flags_of_a_tensor_group_reach_all_ranks(asking: list[int], tmp_path: Path) -> None:
    """Two requests at once must not add up to a third."""
    assert ranks(2).run(stop_from, asking, tmp_path) == [3, 3]


def train_streamed(world: World, **options: Any) -> list[float]:
    run = Run(None, world, determinism="fast", **options)
    model = run.prepare(small())
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    losses = []
    for step in run.steps(run.loader(Streamed(), 8, lanes=4), epochs=1, finish=False):
        step.accumulate(loss, model)
        step.update(optimizer)
        losses.append(step.loss)
    return losses


def test_ranks_of_a_tensor_group_read_the_same_stream() -> None:
    expected = train_streamed(World())
    assert len(expected) == 5
    options = {"parallel": {"data": 2, "tensor": 2, "shard": 1}, "tensor_plan": PLAN}
    for losses in ranks(4).run(train_streamed, **options):
        assert losses == pytest.approx(expected, rel=1e-5)


def through_the_trainer(world: World, folder: Path) -> tuple[list[Any], bool]:
    """Train with an optimizer that was made before the model was sharded."""
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = Run(folder, world, sinks=[], trace=True, determinism="fast", parallel="fsdp")
    trainer = Trainer(model, optimizer, loss, run=run)
    history = trainer.train(run.loader(data(), 8, lanes=4), DataLoader(data(23), batch_size=5), epochs=2)
    run.finish()
    return history, all(is_dtensor(p) for group in optimizer.param_groups for p in group["params"])


def test_a_trainer_accepts_an_optimizer_made_before_sharding(tmp_path: Path) -> None:
    results = ranks(2).run(through_the_trainer, tmp_path)
    assert all(result == results[0] for result in results)
    history, is_repointed = results[0]
    assert is_repointed
    assert history[-1]["train_loss"] < history[0]["train_loss"]
    checkpoint = latest_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None
    assert {name: tuple(weight.shape) for name, weight in load_weights(checkpoint).items()} == {
        name: tuple(weight.shape) for name, weight in small().state_dict().items()
    }
    last = list(read_jsonl(RunFolder(tmp_path).trace))[-1]["phases"]
    assert "none" not in last["gradient"].values()
    assert not any("≠" in digest for phase in last.values() for digest in phase.values())
