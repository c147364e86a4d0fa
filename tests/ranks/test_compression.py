"""Gradients that travel compressed: as good as uncompressed ones, in fewer bytes, and a run that resumes goes on."""

import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.engine.compression import HalfPrecision
from lockstep.engine.digest import tensor_digests
from lockstep.errors import Stopped
from lockstep.events.jsonl import read_lines
from lockstep.testing import ranks
from lockstep.train.run import Run
from lockstep.train.step import Step
from lockstep.world.world import World
from tests.commands import LOCKSTEP, run

POWERSGD = {"kind": "powersgd", "rank": 2, "start_after": 2}
KINDS: dict[str, Any] = {"none": "none", "fp16": "fp16", "bf16": "bf16", "powersgd": POWERSGD}
STEPS = 6


class Result(NamedTuple):
    losses: list[float]
    weights: Tensor
    digests: dict[str, str]
    traffic: dict[str, int]
    sent: int  # bytes, as a look at what is handed over has it


def make_model() -> nn.Module:
    """Large enough for several buckets: more than a megabyte."""
    return nn.Sequential(nn.Linear(64, 3000), nn.Tanh(), nn.Linear(3000, 64), nn.Tanh(), nn.Linear(64, 5))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(92, 64, generator=generator), torch.arange(92) % 5)


def loss(scale: float, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    return scale * F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def train(
    world: World, folder: Path | None = None, stop: int | None = None, scale: float = 1.0, **options: Any
) -> Result:
    torch.set_num_threads(1)
    job = Run(folder, world, seed=5, sinks=[], determinism="fast", **options)
    job.stop_after = stop
    model = job.prepare(make_model())
    optimizer = job.optimizer(model, lambda p: torch.optim.SGD(p, lr=0.1 / scale, momentum=0.9))
    losses = []
    sent = _count_what_is_sent(world)
    try:
        # The last batch of an epoch is smaller: losses are then divided by another count than the one before.
        for step in job.open_steps(job.loader(data(), 24, lanes=4, tail="short"), steps=STEPS):
            step.accumulate(partial(loss, scale), model)
            step.update(optimizer)
            losses.append(step.loss)
    except Stopped:
        job.close()
    digests = tensor_digests(job.state())
    if stop is None:
        job.finish()
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    return Result(losses, weights, digests, job.traffic, sent())


def _count_what_is_sent(world: World) -> Callable[[], int]:
    """All that leaves this rank from one process to another, in bytes. NCCL sends in another way."""
    if world.backend == "nccl":
        return lambda: 0
    sizes: list[int] = []
    isend = dist.isend

    def counted(tensor: Tensor, *args: Any) -> Any:
        sizes.append(tensor.nbytes)
        return isend(tensor, *args)

    dist.isend = counted

    def total() -> int:
        dist.isend = isend
        return sum(sizes)

    return total


def train_all(world: World) -> dict[str, Result]:
    results = {name: train(world, compression=kind) for name, kind in KINDS.items()}
    results |= {f"fp16 × {scale:g}": train(world, compression="fp16", scale=scale) for scale in (1e-8, 1e8)}
    return results


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_compressed_gradients_train_as_well_in_fewer_bytes(num_ranks: int) -> None:
    results = ranks(num_ranks).run(train_all)
    plain = train(World())
    for own in results:
        assert own["none"].traffic == {}
        for name, tolerance in {"fp16": 1e-4, "bf16": 2e-3, "powersgd": 0.2}.items():
            result = own[name]
            assert result.losses == pytest.approx(plain.losses, rel=tolerance), name
            assert result.digests == results[0][name].digests
            assert result.losses != own["none"].losses
            assert result.traffic["gradient_bytes"] == result.sent // STEPS
        for scale in (1e-8, 1e8):
            result = own[f"fp16 × {scale:g}"]
            torch.testing.assert_close(result.weights, plain.weights, rtol=1e-3, atol=1e-4)
        for name in ("fp16", "bf16"):
            sent, uncompressed = own[name].traffic.values()
            assert uncompressed / 2 <= sent < 0.51 * uncompressed
        sent, uncompressed = own["powersgd"].traffic.values()
        assert 2 / STEPS * uncompressed < sent < (2 / STEPS + 0.1) * uncompressed, "two steps of six go as they are"


def test_one_process_has_nothing_to_compress_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    one = train(World(), compression=POWERSGD)
    assert caplog.messages == ["compression=powersgd has no effect on one process: nothing travels"]
    assert one.digests == train(World()).digests
    assert one.traffic == {}


def resume_all(world: World, folder: Path, stop: int | None) -> dict[str, Result]:
    changes = {"usual": {}, "cold": {"warm_start": False}, "forgetful": {"error_feedback": False}}
    return {name: train(world, folder / name, stop, compression=POWERSGD | change) for name, change in changes.items()}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(num_ranks: int, tmp_path: Path) -> None:
    group = ranks(num_ranks)
    whole = group.run(resume_all, tmp_path / "whole", None)
    group.run(resume_all, tmp_path / "parts", 4)
    for own, expected in zip(group.run(resume_all, tmp_path / "parts", None), whole, strict=True):
        for name, result in own.items():
            assert result.losses == expected[name].losses[4:], name
            assert result.digests == expected[name].digests, name
    *_, end = read_lines(tmp_path / "whole" / "usual" / "events.jsonl")
    assert end["kind"] == "end"
    assert {name: end[name] for name in whole[0]["usual"].traffic} == whole[0]["usual"].traffic


def resume(world: World, folder: Path, compression: Any, stop: int | None = None) -> list[str]:
    """What is said about it."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lockstep")
    logger.addHandler(handler)
    try:
        result = train(world, folder, stop, compression=compression)
    finally:
        logger.removeHandler(handler)
    assert torch.tensor(result.losses).isfinite().all()
    return said


def test_another_number_of_processes_or_another_compression_goes_on_too(tmp_path: Path) -> None:
    ranks(4).run(resume, tmp_path, POWERSGD, 3)
    assert not any("compression" in line for line in ranks(2).run(resume, tmp_path, POWERSGD, 4)[0])
    assert any("left out of the gradients so far is dropped" in line for line in resume(World(), tmp_path, POWERSGD, 5))
    assert any("compression begins anew" in line for line in ranks(2).run(resume, tmp_path, POWERSGD)[0])


class Skipped(NamedTuple):
    made: list[bool]  # updates, by step
    traffic: dict[str, int]


def skip_a_step(world: World, compression: Any) -> Skipped:
    """On one rank, in one step, something is not a number: whose updates are made?"""
    torch.set_num_threads(1)
    job = Run(None, world, determinism="fast", compression=compression, on_nonfinite="skip")
    model = job.prepare(make_model())
    optimizer = job.optimizer(model, lambda p: torch.optim.SGD(p, lr=0.1))
    made = []

    def spoilt(step: Step, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        loss_sum, count = loss(1.0, model, batch)
        return loss_sum * (torch.nan if step.batch.number == 3 and world.rank == 1 else 1.0), count

    for step in job.open_steps(job.loader(data(), 24, lanes=4), steps=5):
        step.accumulate(partial(spoilt, step), model)
        step.update(optimizer)
        made.append(step.is_updated)
    job.finish()
    return Skipped(made, job.traffic)


def fail_to_share(world: World) -> str:
    """On all ranks, in the backward pass of the second step. What is told of it?"""
    job = Run(None, world, determinism="fast", compression="bf16")
    model = job.prepare(make_model())
    optimizer = job.optimizer(model, lambda p: torch.optim.SGD(p, lr=0.1))
    shared = HalfPrecision.average

    def planted(*args: Any) -> None:
        if job.step:
            raise OSError("planted")
        shared(*args)

    HalfPrecision.average = planted  # type: ignore[assignment]
    try:
        for step in job.open_steps(job.loader(data(), 24, lanes=4), steps=3):
            step.accumulate(partial(loss, 1.0), model)
            step.update(optimizer)
    except Exception as error:
        return repr(error)
    finally:
        HalfPrecision.average = shared  # type: ignore[method-assign]
        job.close(abandon=True)
    return "nothing"


def skip_steps(world: World) -> tuple[dict[str, Skipped], str]:
    return {name: skip_a_step(world, kind) for name, kind in KINDS.items()}, fail_to_share(world)


def test_what_is_not_finite_arrives_and_is_not_kept_and_what_fails_is_told_as_it_is() -> None:
    num_bytes = 4 * sum(parameter.numel() for parameter in make_model().parameters())
    for own, told in ranks(2).run(skip_steps):
        for name, each in own.items():
            assert each.made == [True, True, True, False, True, True], name
            if name != "none":
                assert each.traffic["uncompressed_bytes"] == num_bytes, "on two ranks each sends as much as there is"
        assert told == "OSError('planted')"


def test_the_command_says_what_was_saved(tmp_path: Path) -> None:
    fast = ["determinism=fast", "compression.kind=powersgd", "compression.start_after=2"]
    finished = run([*LOCKSTEP, "train", "digits", "--quick", "-n", "2", *fast], tmp_path)
    assert finished.code == 0, finished.err
    told = re.search(r"^gradients: (.*) kB per step on the wire instead of (.*)$", finished.out, re.MULTILINE)
    assert told is not None, finished.out
    assert float(told[1]) < 0.5 * float(told[2])
    steps = [event for event in read_lines(tmp_path / "runs" / "digits-quick" / "events.jsonl") if "loss" in event]
    assert all(0 < event["gradient_bytes"] < event["uncompressed_bytes"] for event in steps)
    refused = run([*LOCKSTEP, "train", "digits", "--quick", "compression=bf16"], tmp_path)
    assert refused.code == 2
    assert "compression=bf16 rounds what every process sends" in refused.err
    refused = run([*LOCKSTEP, "train", "digits", "--quick", "compression.rank=2"], tmp_path)
    assert refused.code == 2
    (line,) = refused.err.splitlines()
    assert line.endswith("compression.rank: is powersgd's, and compression.kind is none")
