"""What counts as rounding in the updates of a job, and what does not."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from lockstep.events.step_trace import TraceDifference
from lockstep.supervision.batch_rows import RecordedRow
from lockstep.supervision.io_recorder import OutputRecord
from lockstep.verify.recorded_updates import RecordedUpdates, collect_updates
from lockstep.verify.update_judgement import Judgement, judge_updates

Array = np.ndarray[Any, Any]
Tensors = dict[str, Array]
Change = Callable[[int, Tensors], Tensors]  # of a step

STEPS = 4


def unchanged(step: int, tensors: Tensors) -> Tensors:
    return tensors


def adam(step: int, gradient: Tensors) -> Tensors:
    """A full step of every element, however small."""
    return {name: 1e-3 * np.sign(each) for name, each in gradient.items()}


def sgd(step: int, gradient: Tensors) -> Tensors:
    return {name: 0.1 * each for name, each in gradient.items()}


def job(
    folder: Path,
    *,
    noise: int = 0,  # the seed of the rounding; 0: none
    noise_size: float = 1e-7,
    dtype: str = "float64",  # of the weights
    gradients: Change = unchanged,
    moves: Change = sgd,
    before: Change = unchanged,  # the first update
    between: Change = unchanged,
    ranks: Mapping[int, Change] | None = None,  # what is between the updates of other ranks than 0
    steps: int = STEPS,
    buffers: Tensors | None = None,
    rows: Callable[[int], list[RecordedRow]] = lambda step: [RecordedRow(f"row {step}")],
    rate: float = 0.1,
    low_precision: bool = False,
) -> RecordedUpdates:
    """Return the updates of a job that trains the two tensors `w` and `key_bias`, whose gradient is rounding alone."""
    folder.mkdir(parents=True)
    files = []
    for rank, change in {0: between, **(ranks or {})}.items():
        random, rounding = np.random.default_rng(0), np.random.default_rng(noise)
        weights: Tensors = {"w": random.normal(size=64).astype(dtype), "key_bias": np.zeros(64, dtype)}
        last = dict.fromkeys(weights, "")
        files.append(OutputRecord(folder, rank))
        lines = []
        for step in range(1, steps + 1):
            weights = (before if step == 1 else change)(step, weights)
            gradient = {"w": random.normal(size=64), "key_bias": 1e-9 * rounding.normal(size=64)}
            gradient["w"] = gradient["w"] * (1 + bool(noise) * noise_size * rounding.normal(size=64))
            gradient = gradients(step, gradient)
            start, step_moves = weights, moves(step, gradient)
            weights = {name: (start[name] - step_moves[name]).astype(dtype) for name in start}
            phases = {"start": start, "gradient": gradient, "weights": weights, "buffers": buffers or {}}
            digests: dict[str, Any] = {
                phase: {name: hashlib.sha256(each.tobytes()).hexdigest() for name, each in tensors.items()}
                for phase, tensors in phases.items()
            }
            if rank == 0:
                phases["start"] = {name: start[name] for name in start if digests["start"][name] != last[name]}
                values = {f"{phase}/{name}": each for phase, some in phases.items() for name, each in some.items()}
                recorded = {name: each.astype("f4") if each.dtype == "f2" else each for name, each in values.items()}
                save_file(recorded, files[0].values(step))
            last = digests["weights"]
            digests |= {"rows": {"rows": rows(step) if rank == 0 else []}, "rates": {"learning rate 0": repr(rate)}}
            lines.append(
                {
                    "step": step,
                    "phases": digests,
                    "layers": [],
                    "has_low_precision": low_precision,
                    "repeated_epoch": None,
                }
            )
        files[-1].updates.write_text("".join(json.dumps(line) + "\n" for line in lines))
    updates = collect_updates(files)
    assert updates is not None
    return updates


@pytest.fixture
def judged(tmp_path: Path) -> Callable[..., TraceDifference | None]:
    """Compare a job with one that has these parts, on other rounding."""

    def judge(both: Mapping[str, Any] | None = None, **parts: Any) -> TraceDifference | None:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        one = job(folder / "one", **(both or {}))
        return judge_updates(one, job(folder / "many", noise=1, **{**(both or {}), **parts}), is_complete=True).mistake

    return judge


@pytest.mark.parametrize("moves", [sgd, adam])
def test_rounding_is_no_mistake_whatever_the_optimizer_makes_of_it(judged: Any, moves: Change) -> None:
    assert judged({"moves": moves}) is None


def scaled(factor: float, *, from_step: int = 1, only: str | None = None) -> Change:
    def change(step: int, tensors: Tensors) -> Tensors:
        return {
            name: each * (factor if step >= from_step and only in (None, name) else 1) for name, each in tensors.items()
        }

    return change


def decayed(factor: float) -> Change:
    return lambda step, gradient: {name: factor * each for name, each in adam(step, gradient).items()}


@pytest.mark.parametrize(
    ("parts", "step", "phase"),
    [
        ({"gradients": scaled(1.05, from_step=3)}, 3, "gradient"),
        ({"gradients": scaled(1e7, only="key_bias")}, 1, "gradient"),
        ({"gradients": scaled(1.0005)}, 1, "gradient"),
        ({"moves": decayed(1.2)}, 1, "weights"),
        ({"between": scaled(1.001)}, 2, "start"),
        ({"between": scaled(1.16, from_step=4)}, 4, "start"),
        ({"buffers": {"mean": np.full(3, 1.1)}}, 1, "buffers"),
        ({"buffers": {"mean": np.ones(3), "count": np.array([5])}}, 1, "buffers"),
        ({"rate": 0.2}, 1, "rates"),
        ({"rows": lambda step: [RecordedRow("another" if step == 3 else f"row {step}")]}, 3, "rows"),
    ],
)
def test_what_is_more_than_rounding_is_found_where_it_begins(
    judged: Any, parts: dict[str, Any], step: int, phase: str
) -> None:
    both = {"moves": adam, "buffers": {"mean": np.ones(3), "count": np.array([4])}}
    found = judged(both, **parts)
    assert found is not None
    assert (found.step, found.phase) == (step, phase)


def test_a_small_tensor_that_moves_otherwise_is_not_hidden_by_large_ones(judged: Any) -> None:
    def odd(factor: float) -> Change:
        return lambda step, gradient: {"w": sgd(step, gradient)["w"], "key_bias": np.full(64, 1e-4 * factor)}

    same = {"gradients": lambda _, each: each | {"key_bias": np.full(64, 1e-3)}}
    assert judged(same | {"moves": odd(1.0)}, moves=odd(1.01)) is None
    found = judged(same | {"moves": odd(1.0)}, moves=odd(2.0))
    assert found is not None
    assert (found.phase, found.tensor) == ("weights", "key_bias")


def test_weights_that_both_jobs_change_between_updates(judged: Any) -> None:
    clipped: Change = lambda step, weights: {name: each.clip(-0.5, 0.5) for name, each in weights.items()}  # noqa: ARG005, E731
    assert judged({"between": clipped}) is None


def test_weights_in_low_precision_move_in_large_steps(judged: Any) -> None:
    half = {
        "dtype": "float16",
        "low_precision": True,
        "moves": lambda step, each: {name: 0.01 * part for name, part in sgd(step, each).items()},
    }
    assert judged(half, noise_size=4e-3) is None
    assert judged(half | {"dtype": "float64"}, noise_size=4e-3) is None, "not because of the noise"


def test_gradients_of_other_parameters(tmp_path: Path) -> None:
    one, many = job(tmp_path / "one"), job(tmp_path / "many", noise=1)
    lines = [json.loads(line) for line in many.trace.read_text().splitlines()]
    lines[1]["phases"]["gradient"]["key_bias"] = "none"
    many.trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert judge_updates(one, many, is_complete=True).mistake == (2, "gradient", "key_bias", 1)


def test_weights_that_were_changed_and_back_before_the_first_update(judged: Any) -> None:
    assert judged(before=scaled(1 + 1e-7)) is None
    found = judged(before=scaled(1 + 1e-5))
    assert found is not None
    assert (found.step, found.phase) == (1, "start")


def test_a_replica_that_drifts_by_little(judged: Any) -> None:
    found = judged(ranks={1: scaled(1 + 1e-9, from_step=3)})
    assert found is not None
    assert (found.step, found.phase, found.tensor) == (3, "start", "w")


def growing(factor: float) -> Change:
    """Add a difference that begins as rounding, and grows by this factor with each update."""

    def change(step: int, gradient: Tensors) -> Tensors:
        return gradient | {"w": gradient["w"] + 1e-7 * factor**step * np.cos(np.arange(64))}

    return change


def test_rounding_that_training_amplifies_is_no_mistake_but_hides_others(tmp_path: Path) -> None:
    one = job(tmp_path / "one", steps=9)
    many = job(tmp_path / "many", noise=1, steps=9, gradients=growing(6.0), between=scaled(1.5, from_step=9))
    assert judge_updates(one, many, is_complete=True) == Judgement(None, 8)
    jumped = job(tmp_path / "jumped", noise=1, steps=9, gradients=growing(60.0))
    assert judge_updates(one, jumped, is_complete=True) == Judgement(TraceDifference(4, "gradient", "w", 1))


def test_a_gradient_that_vanishes_consists_of_rounding(tmp_path: Path) -> None:
    def vanishing(step: int, gradient: Tensors) -> Tensors:
        return {name: each * 1e-6 ** (step > 2) for name, each in gradient.items()}

    def noisy(step: int, gradient: Tensors) -> Tensors:
        return vanishing(step, gradient) | {"w": vanishing(step, gradient)["w"] + 1e-7 * np.cos(np.arange(64))}

    one, many = job(tmp_path / "one", gradients=vanishing), job(tmp_path / "many", noise=1, gradients=noisy)
    assert judge_updates(one, many, is_complete=True) == Judgement(None, 3)


def test_other_numbers_of_steps(judged: Any, tmp_path: Path) -> None:
    assert judged(steps=STEPS - 1) == (3, "end", "4 steps and 3", 1)
    one, failed = job(tmp_path / "again"), job(tmp_path / "failed", noise=1, steps=2)
    assert judge_updates(one, failed, is_complete=False).mistake is None, "it did not get further"


def test_ranks_that_make_other_numbers_of_steps(tmp_path: Path) -> None:
    one, many = job(tmp_path / "one"), job(tmp_path / "many", noise=1, ranks={1: unchanged})
    assert judge_updates(one, many, is_complete=True).mistake is None
    lines = OutputRecord(tmp_path / "many", 1).updates.read_text().splitlines(keepends=True)
    OutputRecord(tmp_path / "many", 1).updates.write_text("".join(lines[:2]))
    shorter = collect_updates([OutputRecord(tmp_path / "many", rank) for rank in range(2)])
    assert shorter is not None
    assert judge_updates(one, shorter, is_complete=True).mistake == (2, "end", "4 steps and 2 or 4", 1)
