"""Compressed gradients: as good as uncompressed ones, in fewer bytes; and runs resume with the same bits."""

import logging
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lockstep.engine.compression import HalfPrecision
from lockstep.events.jsonl import read_jsonl
from lockstep.testing import ranks
from lockstep.train.run import Run
from lockstep.train.step import Step
from lockstep.world.world import World
from tests.commands import LOCKSTEP, call, run
from tests.ranks.compression_workloads import KINDS, POWERSGD, STEPS, Result, data, loss, make_model, train


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
    assert caplog.messages == ["compression=powersgd has no effect on one process: nothing is sent"]
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
    *_, end = read_jsonl(tmp_path / "whole" / "usual" / "events.jsonl")
    assert end["kind"] == "end"
    assert {name: end[name] for name in whole[0]["usual"].traffic} == whole[0]["usual"].traffic


def resume(world: World, folder: Path, compression: Any, stop: int | None = None) -> list[str]:
    """Resume a run, and return the messages that it logs."""
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


def test_a_run_resumes_on_other_processes_or_with_other_compression(tmp_path: Path) -> None:
    ranks(4).run(resume, tmp_path, POWERSGD, 3)
    assert not any("compression" in line for line in ranks(2).run(resume, tmp_path, POWERSGD, 4)[0])
    dropped = "gradient error that compression has accumulated is dropped"
    assert any(dropped in line for line in resume(World(), tmp_path, POWERSGD, 5))
    assert any("compression starts from zero" in line for line in ranks(2).run(resume, tmp_path, POWERSGD)[0])


class Skipped(NamedTuple):
    made: list[bool]  # updates, by step
    traffic: dict[str, int]


def skip_a_step(world: World, compression: Any) -> Skipped:
    """Put a NaN into one rank's gradients in one step; return which updates each rank makes."""
    torch.set_num_threads(1)
    job = Run(None, world, determinism="fast", compression=compression, on_nonfinite="skip")
    model = job.prepare(make_model())
    optimizer = job.optimizer(model, lambda p: torch.optim.SGD(p, lr=0.1))
    made = []

    def spoilt(step: Step, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        loss_sum, count = loss(1.0, model, batch)
        return loss_sum * (torch.nan if step.batch.number == 3 and world.rank == 1 else 1.0), count

    for step in job.steps(job.loader(data(), 24, lanes=4), steps=5, finish=False):
        step.accumulate(partial(spoilt, step), model)
        step.update(optimizer)
        made.append(step.is_updated)
    job.finish()
    return Skipped(made, job.traffic)


def fail_to_share(world: World) -> str:
    """Fail on all ranks in the backward pass of the second step; return the error message."""
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
        for step in job.steps(job.loader(data(), 24, lanes=4), steps=3, finish=False):
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


def test_nonfinite_gradients_arrive_and_failures_are_reported_unchanged() -> None:
    num_bytes = 4 * sum(parameter.numel() for parameter in make_model().parameters())
    for own, message in ranks(2).run(skip_steps):
        for name, each in own.items():
            assert each.made == [True, True, True, False, True, True], name
            if name != "none":
                assert each.traffic["uncompressed_bytes"] == num_bytes, "on two ranks each sends as much as there is"
        assert message == "OSError('planted')"


def test_the_command_reports_the_bytes_saved(tmp_path: Path) -> None:
    fast = ["determinism=fast", "compression.kind=powersgd", "compression.start_after=2"]
    finished = run([*LOCKSTEP, "train", "digits", "--quick", "-n", "2", *fast], tmp_path)
    assert finished.code == 0, finished.err
    printed = re.search(r"^gradients: (.*) kB per step on the wire instead of (.*)$", finished.out, re.MULTILINE)
    assert printed is not None, finished.out
    assert float(printed[1]) < 0.5 * float(printed[2])
    steps = [event for event in read_jsonl(tmp_path / "runs" / "digits-quick" / "events.jsonl") if "loss" in event]
    assert steps
    assert all(0 < event["gradient_bytes"] < event["uncompressed_bytes"] for event in steps)
    refused = call(["train", "digits", "--quick", "compression=bf16"], tmp_path)
    assert refused.code == 2
    assert "compression=bf16 rounds what every process sends" in refused.err
    refused = call(["train", "digits", "--quick", "compression.rank=2"], tmp_path)
    assert refused.code == 2
    (line,) = refused.err.splitlines()
    assert line.endswith("compression.rank: only valid with kind: powersgd, got kind: none")
