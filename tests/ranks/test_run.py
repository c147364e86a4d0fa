"""Runs on several ranks: what they agree on, and the errors when they cannot."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from lockstep.engine.tree_engine import TreeEngine
from lockstep.errors import LockstepError, UserError
from lockstep.events.jsonl import read_jsonl
from lockstep.testing import RanksFailed, ranks
from lockstep.train.run import Run
from lockstep.world.world import World
from tests.classification import DATA, loss


def part_ways(world: World) -> str:
    run = Run(None, world)
    model = run.prepare(nn.Linear(4, 3))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    for step in run.steps(run.loader(DATA, 16), steps=2, finish=False):
        step.accumulate(loss, model)
        step.update(optimizer)
    with torch.no_grad():
        model.bias[0] += world.rank
    try:
        run.finish()
    except LockstepError as error:
        run.close()
        return str(error)
    return "not noticed"


def test_ranks_that_diverge_are_an_error_that_says_where() -> None:
    for message in ranks(2).run(part_ways):
        assert message.startswith("after step 2 the ranks differ in model/bias")


def weights_after_preparing(world: World) -> list[float]:
    run = Run(None, world)
    torch.manual_seed(world.rank)  # as a script that seeds each rank in its own way would
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model[1].running_mean.fill_(world.rank)
    run.prepare(model)
    return [model[0].weight.sum().item(), model[1].running_mean.sum().item()]


def test_all_ranks_begin_with_rank_0s_weights_and_buffers() -> None:
    first, second = ranks(2).run(weights_after_preparing)
    assert first == second
    assert first[1] == 0


def start_with_too_few_lanes(world: World) -> None:
    Run(None, world).loader(DATA, 16, lanes=2)


def test_more_processes_than_lanes_are_refused() -> None:
    with pytest.raises(RanksFailed, match="3 processes cannot share lanes=2"):
        ranks(3).run(start_with_too_few_lanes)


def what_is_left(world: World) -> list[str]:
    groups, earlier = len(dist.distributed_c10d._world.pg_map), set(threading.enumerate())
    run = Run(None, world)
    model = run.prepare(nn.Linear(4, 3))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    for step in run.steps(run.loader(DATA, 16), epochs=1, finish=False):
        step.accumulate(loss, model)
        step.update(optimizer)
    run.close()
    threads = [thread.name for thread in threading.enumerate() if thread not in earlier]
    hooks = [name for name, p in model.named_parameters() if p._post_accumulate_grad_hooks]
    return threads + hooks + ["groups"] * (len(dist.distributed_c10d._world.pg_map) - groups)


def test_a_closed_run_leaves_no_thread_no_hook_and_no_group() -> None:
    assert ranks(2).run(what_is_left) == [[], []]


def bytes_per_step(world: World, num_lanes: int) -> tuple[int, int]:
    run = Run(None, world)
    model = run.prepare(nn.Sequential(nn.Linear(4, 256), nn.Linear(256, 3)))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    for step in run.steps(run.loader(DATA, 16, lanes=num_lanes), steps=4, finish=False):
        step.accumulate(loss, model)
        step.update(optimizer)
    assert isinstance(run._loop.engine, TreeEngine) and run._loop.engine.comm is not None
    sent = run._loop.engine.comm.bytes_sent // 4
    run.close()
    return sent, sum(parameter.nbytes for parameter in model.parameters())


def test_two_and_four_ranks_send_a_rings_bytes() -> None:
    for num_ranks, most in ((2, 1.03), (4, 1.03), (3, 1.34 * 1.03)):  # and a few for alignment and used parameters
        results = ranks(num_ranks).run(bytes_per_step, 8)
        ring = 2 * results[0][1] * (num_ranks - 1) / num_ranks
        assert ring <= sum(sent for sent, _ in results) / num_ranks <= most * ring


def fail_alone(world: World, folder: str) -> None:
    run = Run(folder, world)
    model = run.prepare(nn.Linear(4, 3))
    for step in run.steps(run.loader(DATA, 16), steps=2):
        if world.rank == 1:
            raise ValueError("planted")
        step.accumulate(loss, model)


def test_a_rank_that_fails_alone_is_named_and_delays_no_other(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks(2).run(fail_alone, str(tmp_path / "a"))
    assert "rank 1 (first to fail)" in str(caught.value)
    assert "ValueError: planted" in str(caught.value)


def speak_of_different_terms(world: World, names: list[list[str]], determinism: Any) -> None:
    run = Run(None, world, determinism=determinism)
    model = run.prepare(nn.Linear(4, 3))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    for step in run.steps(run.loader(DATA, 16), steps=1, finish=False):
        step.accumulate(lambda model, batch: {name: loss(model, batch) for name in names[world.rank]}, model)
        step.update(optimizer)


@pytest.mark.parametrize("names", [[["a", "b"], ["b", "a"]], [["a", "b"], ["a"]]])
@pytest.mark.parametrize("determinism", ["lockstep", "fast"])
def test_different_loss_terms_on_different_ranks_are_an_error(names: list[list[str]], determinism: str) -> None:
    with pytest.raises(RanksFailed, match="loss terms differ between ranks"):
        ranks(2, timeout_s=30).run(speak_of_different_terms, names, determinism)


def terms(model: nn.Module, batch: Sequence[Tensor]) -> dict[str, tuple[Tensor, Any]]:
    """Train with two loss terms, each with its own count; in some lanes the second counts nothing."""
    inputs, labels = batch
    scores = model(inputs)
    chosen = (labels == 0) & (inputs[:, 0] > 0)
    return {
        "entropy": (F.cross_entropy(scores, labels, reduction="sum"), len(labels)),
        "size": (scores[chosen].square().sum(), chosen.sum()),
        "spread": (0.1 * scores.abs().sum().reshape(1), 2.5 * len(labels)),
    }


def some_targets(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Train with one loss term, whose count differs from step to step."""
    inputs, labels = batch
    chosen = (labels == 0) & (inputs[:, 0] > 0)
    return F.cross_entropy(model(inputs)[chosen], labels[chosen], reduction="sum"), chosen.sum()


class Trained(NamedTuple):
    losses: list[float]
    weights: Tensor


def train_on(objective: Any, world: World, num_samples: int, loader: dict[str, Any], determinism: Any) -> Trained:
    run = Run(None, world, determinism=determinism)
    model = run.prepare(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    losses = []
    data = TensorDataset(*(tensor[:num_samples] for tensor in DATA.tensors))
    for step in run.steps(run.loader(data, 24, lanes=8, tail="short", **loader), epochs=2, finish=False):
        step.accumulate(objective, model)
        step.update(optimizer)
        losses.append(step.loss)
    run.finish()
    return Trained(losses, torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))


def train_terms(world: World, num_samples: int, loader: dict[str, Any], determinism: Any) -> Trained:
    return train_on(terms, world, num_samples, loader, determinism)


def train_some_targets(world: World, num_samples: int, loader: dict[str, Any], determinism: Any) -> Trained:
    return train_on(some_targets, world, num_samples, loader, determinism)


def train_all_targets(world: World, num_samples: int, loader: dict[str, Any], determinism: Any) -> Trained:
    return train_on(loss, world, num_samples, loader, determinism)


@pytest.mark.parametrize(
    ("num_ranks", "num_samples", "loader"),
    [
        (1, 64, {}),
        (2, 64, {}),
        (3, 64, {}),
        # Of 2 samples in the third batch lane 3 has one, and lane 7: a rank's last lane is empty, or all it has.
        (1, 50, {}),
        (2, 50, {"lanes_per_rank": [5, 3]}),
        (3, 50, {"lanes_per_rank": [3, 2, 3]}),
    ],
)
@pytest.mark.parametrize("train", [train_terms, train_some_targets, train_all_targets])
def test_losses_are_normalised_alike_in_fast_mode(num_ranks: int, num_samples: int, loader: Any, train: Any) -> None:
    (exact,) = ranks(1).run(train, num_samples, {}, "lockstep")
    for fast in ranks(num_ranks).run(train, num_samples, loader, "fast"):
        assert fast.losses == pytest.approx(exact.losses, rel=1e-5)
        torch.testing.assert_close(fast.weights, exact.weights, rtol=1e-5, atol=1e-7)


class Halves(nn.Module):
    """Two layers, of which either both or only the first are used."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, inputs: Tensor, both: bool) -> Tensor:
        scores: Tensor = self.left(inputs)
        return scores + self.right(inputs) if both else scores


def leave_a_layer_out(world: World) -> list[float]:
    """Use both layers in the first term on the first rank's lane only: elsewhere its gradients are incomplete."""
    run = Run(None, world, bucket_mb=1e-5)
    model = run.prepare(Halves())
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))

    def some_without(model: nn.Module, batch: Sequence[Tensor]) -> dict[str, tuple[Tensor, int]]:
        inputs, labels = batch
        is_first = bool(labels[0] == 0)
        first, second = model(inputs, both=is_first), model(-inputs, both=True)
        return {
            "first": (F.cross_entropy(first, labels, reduction="sum"), len(labels)),
            "second": (second.square().sum(), 2 * len(labels)),
        }

    loader = run.loader(DATA, 16, lanes=2, shuffle=False)  # lanes begin at samples 0 and 8, of classes 0 and 2
    for step in run.steps(loader, steps=1, finish=False):
        step.accumulate(some_without, model)
        step.update(optimizer)
    run.finish()
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


def test_all_ranks_send_the_gradients_of_loss_terms_in_one_order() -> None:
    (alone,) = ranks(1).run(leave_a_layer_out)
    assert ranks(2, timeout_s=30).run(leave_a_layer_out) == [alone] * 2


class CheckpointedTwice(nn.Module):
    """A layer used in two re-entrant checkpoints, each of which produces a gradient."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.use_reentrant = use_reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for _ in range(2):
            hidden = checkpoint(self.shared, hidden, use_reentrant=self.use_reentrant)
        scores: Tensor = self.last(hidden)
        return scores


def train_checkpointed(world: World, use_reentrant: bool) -> list[float]:
    run = Run(None, world)
    model = run.prepare(CheckpointedTwice(use_reentrant))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    for step in run.steps(run.loader(DATA, 16), steps=2, finish=False):
        step.accumulate(loss, model)
        step.update(optimizer)
    run.finish()
    weights: list[float] = model.shared.weight.flatten().tolist()
    return weights


def test_a_gradient_that_arrives_twice_is_an_error_with_a_remedy() -> None:
    with pytest.raises(RanksFailed, match=r"received its gradient twice in one backward pass.*use_reentrant=False"):
        ranks(2, timeout_s=30).run(train_checkpointed, True)
    (alone,) = ranks(1).run(train_checkpointed, False)
    assert ranks(2).run(train_checkpointed, False) == [alone] * 2, "the remedy is one"


def skip_a_batch(world: World) -> list[float]:
    run = Run(None, world)
    model = run.prepare(nn.Linear(4, 3))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    for step in run.steps(run.loader(DATA, 16), epochs=1, finish=False):
        step.accumulate(loss, model)
        if step.batch.number == 1:
            step.skip()
        else:
            step.update(optimizer)
    run.finish()
    weights: list[float] = model.weight.flatten().tolist()
    return weights


def test_a_batch_may_be_skipped_on_all_ranks() -> None:
    alone = ranks(1).run(skip_a_batch)[0]
    assert ranks(3).run(skip_a_batch) == [alone] * 3


def evaluate_with_draws(world: World) -> tuple[dict[str, float], float]:
    run = Run(None, world)
    model = run.prepare(nn.Linear(4, 3))

    def draw(_model: nn.Module, batch: Sequence[Tensor]) -> dict[str, tuple[float, int]]:
        return {"drawn": (torch.rand(1).item(), len(batch[0]))}

    torch.manual_seed(1)
    return run.evaluate(model, DATA, draw, batch=10), torch.rand(1).item()


def test_what_a_metric_draws_does_not_depend_on_the_ranks() -> None:
    alone = ranks(1).run(evaluate_with_draws)[0]
    for num_ranks in (2, 3):
        assert ranks(num_ranks).run(evaluate_with_draws) == [alone] * num_ranks


def evaluate_and_look(world: World) -> tuple[bool, bool]:
    run = Run(None, world)
    model = run.prepare(nn.Linear(4, 3))
    kept: list[Tensor] = []

    def keep(model: nn.Module, batch: Sequence[Tensor]) -> dict[str, tuple[Tensor, int]]:
        kept.append(model(batch[0]))
        return {"sum": (kept[-1].sum(), len(batch[0]))}

    run.evaluate(model, DATA, keep, batch=10)
    return any(scores.requires_grad for scores in kept), torch.is_grad_enabled()


def test_evaluation_keeps_no_graph() -> None:
    assert ranks(2).run(evaluate_and_look) == [(False, True)] * 2


def train_finish_and_train_on(world: World, folder: str) -> None:
    run = Run(folder, world, sinks=[])
    model = run.prepare(nn.Linear(4, 3))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    for _ in range(2):
        for step in run.steps(run.loader(DATA, 16), steps=2):
            step.accumulate(loss, model)
            step.update(optimizer)


def test_continuing_a_finished_run_is_a_new_attempt(tmp_path: Path) -> None:
    ranks(2).run(train_finish_and_train_on, str(tmp_path / "a"))
    events = list(read_jsonl(tmp_path / "a" / "events.jsonl"))
    assert [(event["attempt"], event["kind"], event["step"]) for event in events] == [
        (1, "start", 0),
        (1, "checkpoint", 2),
        (1, "end", 2),
        (2, "start", 2),
        (2, "checkpoint", 4),
        (2, "end", 4),
    ]


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_ctx: Any, _gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise RuntimeError("in the middle of a backward pass")


def go_on_after_a_backward_pass_that_failed(world: World) -> tuple[list[str], str]:
    run = Run(None, world, sinks=[], bucket_mb=1e-6)  # a bucket for each parameter
    torch.set_num_threads(1)
    first, last = nn.Linear(4, 8), nn.Linear(8, 1)
    model = run.prepare(nn.Sequential(first, last))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    seen: list[str] = []
    for step in run.steps(run.loader(torch.utils.data.TensorDataset(inputs), 8, lanes=4), steps=3, finish=False):
        own_lanes = iter(step.batch.lanes)

        def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
            lane = next(own_lanes).lane  # noqa: B023
            hidden = first(batch[0])
            if step.batch.number == 1 and lane == step.batch.lanes[-1].lane:  # noqa: B023
                hidden = Breaks.apply(hidden)
            return last(hidden).square().sum(), len(batch[0])

        try:
            step.accumulate(loss, model)
            step.update(optimizer)
            seen.append(repr(step.loss))
        except RuntimeError as error:
            seen.append(str(error))
            step.skip()
    return seen, run.finish()


def test_training_continues_after_a_backward_pass_that_failed_on_all_ranks() -> None:
    (alone,) = ranks(1).run(go_on_after_a_backward_pass_that_failed)
    assert alone[0][1] == "in the middle of a backward pass" and len(alone[0]) == 4
    for result in ranks(2).run(go_on_after_a_backward_pass_that_failed):
        assert result == alone


def update_after_the_loop(world: World) -> str:
    run = Run(None, world, sinks=[])
    model = run.prepare(nn.Linear(4, 3))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    step = next(iter(run.steps(run.loader(DATA, 16), steps=1, finish=False)))  # nothing refers to the loop
    try:
        step.accumulate(lambda model, batch: (model(batch[0]).sum(), len(batch[0])), model)
        step.update(optimizer)
    except UserError as error:
        return str(error)
    finally:
        run.close(abandon=True)
    return ""


def test_a_step_used_after_its_loop_is_an_error_and_does_not_hang() -> None:
    for text in ranks(2).run(update_after_the_loop):
        assert "this step's training loop has ended" in text
