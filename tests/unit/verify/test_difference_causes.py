"""Scripts with their own loop: the ranks' records combined, the size of a difference, and its likely cause."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from lockstep.events.step_trace import TraceDifference, first_difference
from lockstep.supervision.batch_rows import RecordedRow
from lockstep.supervision.io_recorder import OutputRecord
from lockstep.supervision.step_recorder import RANDOM_NUMBERS
from lockstep.verify.difference_causes import explain_difference, explain_rounding
from lockstep.verify.recorded_updates import UPDATE_PHASES, RankDisagreement, RecordedUpdates, collect_updates
from lockstep.verify.update_judgement import judge_updates

GRADIENT = np.array([1.0, -2.0, 4.0])


def job(
    folder: Path,
    *ranks: list[str],
    gradient: Any = GRADIENT,
    weights: tuple[str, ...] = (),
    gradients: tuple[str, ...] = (),
    changes: Mapping[str, Any] | None = None,
    layers: tuple[str, ...] = (),
    moves: Mapping[str, Any] | None = None,
    low_precision: bool = False,
) -> RecordedUpdates:
    """Return one update, recorded by ranks with these rows."""
    folder.mkdir()
    files = [OutputRecord(folder, rank) for rank in range(len(ranks))]
    for rank, rows in enumerate(ranks):
        phases = {
            "start": {"w": "a"},
            "rows": {"rows": [RecordedRow(row) for row in rows]},
            "gradient": {"w": (gradients or [repr(gradient)] * len(ranks))[rank]},
            "rates": {"learning rate 0": "0.1"},
            "weights": {"w": (weights or [repr(gradient)] * len(ranks))[rank]},
            "buffers": {},
            **(changes or {}),
        }
        line = {
            "step": 1,
            "phases": phases,
            "layers": list(layers),
            "has_low_precision": low_precision,
            "repeated_epoch": None,
        }
        files[rank].updates.write_text(json.dumps(line) + "\n")
    values = {f"{phase}/w": np.asarray(gradient) for phase in ("gradient", "weights")}
    values |= {f"{phase}/w": np.asarray(moved) for phase, moved in (moves or {}).items()}
    save_file(values, files[0].values(1))
    updates = collect_updates(files)
    assert updates is not None
    return updates


def cause(one: RecordedUpdates, many: RecordedUpdates) -> str:
    judgement = judge_updates(one, many, is_complete=True)
    at = judgement.mistake
    if at is None:
        at = first_difference(one.trace, many.trace, UPDATE_PHASES)
        assert at is not None
        return f"{at.phase}: {explain_rounding(one, many, judgement)}"
    return f"{at.phase}: {explain_difference(at, one, many, num_ranks=2)}"


def test_rows_in_another_order_on_other_ranks_are_the_same_rows(tmp_path: Path) -> None:
    one = job(tmp_path / "one", ["a", "b", "c", "d"])
    many = job(tmp_path / "many", ["a", "c"], ["b", "d"])
    assert first_difference(one.trace, many.trace, UPDATE_PHASES) is None


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((["a", "b"], ["c", "d"]), "In step 1, one process was given 2 rows and 2 processes 4 in total."),
        ((["a", "b"], ["b", "a"]), "same 2 rows as the single process: the work is repeated"),
        ((["a"], ["x"]), "Only 1 of 2 rows are the same."),
        ((["x"], ["y"]), "None of the 2 rows are the same"),
    ],
)
def test_other_rows(tmp_path: Path, ranks: tuple[list[str], ...], expected: str) -> None:
    gradient = GRADIENT if "repeated" in expected else GRADIENT * 1.2
    explanation = cause(job(tmp_path / "one", ["a", "b"]), job(tmp_path / "many", *ranks, gradient=gradient))
    assert explanation.startswith("rows: ")
    assert expected in explanation
    assert ('--one-args "--batch-size 4"' in explanation) == ("4 in total" in expected)


def test_other_rows_with_the_same_gradient_are_not_samples(tmp_path: Path) -> None:
    explanation = cause(job(tmp_path / "one", ["t0", "t1"]), job(tmp_path / "many", ["a0", "a1"], ["b0", "b1"]))
    assert explanation.startswith("rows: This is rounding")
    assert "The samples were not compared: the first dimension of the model's inputs" in explanation


@pytest.mark.parametrize(
    ("gradient", "layers", "expected"),
    [
        (GRADIENT + np.array([0, 0, 4e-7]), (), "This is rounding"),
        (GRADIENT + np.array([0, 0, 4e-7]), ("Dropout",), "This is rounding"),
        (GRADIENT * 2, (), "2 times its length: the loss is averaged over a different number"),
        (GRADIENT * 1.001, (), "1.001 times its length: the loss is averaged over a different number"),
        (GRADIENT + np.array([0, 0, 4e-3]), (), "It is large for fp32: in step 1 the gradient differs by 0.00087 of"),
        (GRADIENT + np.array([0, 0, 2e-2]), (), "more than rounding"),
        (GRADIENT + np.array([3, 0, 0]), ("BatchNorm1d",), "sees only a process's own part of the batch"),
        (GRADIENT + np.array([3, 0, 0]), ("Dropout",), "from its own random stream"),
        (GRADIENT + np.array([3, 0, 0]), (RANDOM_NUMBERS,), "The model draws random numbers (by torch.nn.functional"),
        (GRADIENT + np.array([3, 0, 0]), (), "by far more than rounding"),
    ],
)
def test_another_gradient(tmp_path: Path, gradient: Any, layers: tuple[str, ...], expected: str) -> None:
    one = job(tmp_path / "one", ["a", "b"], layers=layers)
    explanation = cause(one, job(tmp_path / "many", ["a"], ["b"], gradient=gradient, layers=layers))
    assert explanation.startswith("gradient: ")
    assert expected in explanation


def test_rounding_is_larger_in_low_precision(tmp_path: Path) -> None:
    one, coarse = job(tmp_path / "one", ["a", "b"]), GRADIENT + np.array([0, 0, 0.2])
    explanation = cause(one, job(tmp_path / "many", ["a"], ["b"], gradient=coarse, low_precision=True))
    assert "This is rounding (as far as can be told in bf16, fp16 or TF32" in explanation
    dropped = job(tmp_path / "dropped", ["a"], ["b"], gradient=coarse, low_precision=True, layers=("Dropout",))
    assert "from its own random stream. Or this is rounding of bf16" in cause(one, dropped)


def test_a_gradient_that_only_one_process_has(tmp_path: Path) -> None:
    many = job(tmp_path / "many", ["a"], ["b"], changes={"gradient": {"w": "none"}})
    save_file({"weights/w": GRADIENT}, many.rank_0.values(1))
    assert "gradients for different parameters" in cause(job(tmp_path / "one", ["a", "b"]), many)


def test_ranks_with_parts_of_unequal_size(tmp_path: Path) -> None:
    many = job(tmp_path / "many", ["a", "b"], ["c"], gradient=GRADIENT + np.array([3, 0, 0]))
    assert "The ranks were given 2 and 1 rows" in cause(job(tmp_path / "one", ["a", "b", "c"]), many)


def test_a_larger_difference_after_rounding_is_reported_instead(tmp_path: Path) -> None:
    one = job(tmp_path / "one", ["a", "b"])
    changes = {"rates": {"learning rate 0": "0.2"}}
    explanation = cause(
        one, job(tmp_path / "many", ["a"], ["b"], gradient=GRADIENT + np.array([0, 0, 4e-7]), changes=changes)
    )
    assert explanation.startswith("rates: The learning rate depends on the number of processes")


def test_a_rank_with_other_settings(tmp_path: Path) -> None:
    one, many = job(tmp_path / "one", ["a", "b"]), job(tmp_path / "many", ["a"], ["b"])
    at = TraceDifference(1, "rates", "weight decay 0", 1)
    explanation = explain_difference(at, one, many._replace(disagreement=RankDisagreement(1, at)), num_ranks=2)
    assert explanation == "In step 1, rank 1 of 2 did not use the same weight decay as rank 0."


def test_the_batch_is_suspected_if_no_rows_were_observed(tmp_path: Path) -> None:
    explanation = cause(
        job(tmp_path / "one", []), job(tmp_path / "many", [], [], gradient=GRADIENT + np.array([3, 0, 0]))
    )
    assert "most likely the global batch is not the same" in explanation


@pytest.mark.parametrize(
    ("changes", "values", "expected"),
    [
        ({"start": {"w": "b"}}, {"start": GRADIENT}, "torch.manual_seed"),
        ({"rates": {"learning rate 0": "0.2"}}, {}, "The learning rate depends on the number of processes"),
        (
            {"weights": {"w": "b"}},
            {"weights": GRADIENT * 1.1},
            "The same gradient and learning rate changed the weights differently",
        ),
        ({"buffers": {"w": "b"}}, {"buffers": GRADIENT * 1.1}, "SyncBatchNorm"),
    ],
)
def test_other_phases(tmp_path: Path, changes: Mapping[str, Any], values: Mapping[str, Any], expected: str) -> None:
    usual = {"start": 0 * GRADIENT, "buffers": GRADIENT}
    one = job(tmp_path / "one", ["a", "b"], moves=usual)
    explanation = cause(one, job(tmp_path / "many", ["a"], ["b"], changes=changes, moves=usual | dict(values)))
    assert explanation.startswith(f"{next(iter(changes))}: ")
    assert expected in explanation


def test_ranks_that_disagree_with_each_other(tmp_path: Path) -> None:
    one = job(tmp_path / "one", ["a", "b"])
    many = job(tmp_path / "many", ["a"], ["b"], gradient=GRADIENT * 2, gradients=("x", "y"))
    assert many.disagreement == (1, TraceDifference(1, "gradient", "w", 1))
    assert "rank 1 of 2 used a different gradient than rank 0 (w): it was not averaged" in cause(one, many)
    repeated = job(tmp_path / "repeated", ["a", "b"], ["a", "b"], weights=("x", "y"))
    explanation = cause(one, repeated)
    assert "the work is repeated" in explanation
    assert "computed different weights than rank 0" in explanation


def test_a_difference_between_the_jobs_is_explained_before_one_of_the_ranks_later_in_the_step(tmp_path: Path) -> None:
    one = job(tmp_path / "one", ["a", "b"])
    many = job(tmp_path / "many", ["a"], ["b"], gradient=GRADIENT * 2, weights=("x", "y"))
    assert many.disagreement == (1, TraceDifference(1, "weights", "w", 1))
    assert "2 times its length" in cause(one, many)


def test_only_one_rank_trains(tmp_path: Path) -> None:
    one, many = job(tmp_path / "one", ["a"]), job(tmp_path / "many", ["a"])
    alone = collect_updates([many.rank_0, OutputRecord(tmp_path / "many", 1)])
    assert alone is not None
    assert (alone.num_updates, alone.updates_by_rank) == (0, [1, 0])
    at = judge_updates(one, alone, is_complete=True).mistake
    assert at is not None
    assert "(rank 0 made 1, rank 1 made 0)" in explain_difference(at, one, alone, num_ranks=2)


def test_a_job_that_trained_nothing_has_no_updates(tmp_path: Path) -> None:
    assert collect_updates([OutputRecord(tmp_path, 0)]) is None
    files = OutputRecord(tmp_path, 0)
    files.updates.write_text('{"step": 1, "pha')
    assert collect_updates([files]) is None, "its first line is incomplete"
