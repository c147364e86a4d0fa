"""Where two traces diverge: the first step, then the first phase, then the first tensor in the order written."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import UserError
from lockstep.events.step_trace import first_difference

AGREED = {
    "data": {"lane 0": "a", "lane 1": "b"},
    "loss": {"loss": "1.5"},
    "gradient": {"model/w": "c", "model/b": "d"},
    "state": {"model/w": "e", "model/b": "f"},
}


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def step(number: int, **phases: dict[str, str]) -> dict[str, Any]:
    return {"step": number, "phases": AGREED | phases}


def test_traces_that_agree(tmp_path: Path) -> None:
    left = write(tmp_path / "left", step(1), step(2))
    right = write(tmp_path / "right", step(1), step(2), step(3))
    assert first_difference(left, right) is None


def test_an_earlier_step_comes_before_an_earlier_phase(tmp_path: Path) -> None:
    left = write(tmp_path / "left", step(1), step(2), step(3))
    right = write(
        tmp_path / "right",
        step(1),
        step(2, state={"model/w": "e", "model/b": "other"}),
        step(3, data={"lane 0": "other", "lane 1": "b"}),
    )
    assert str(first_difference(left, right)) == "step 2, state: model/b"


@pytest.mark.parametrize("first", range(4))
def test_within_a_step_the_first_phase_is_named(tmp_path: Path, first: int) -> None:
    # Written in another order: the order of computation decides, not that of the file.
    backwards = {"step": 1, "phases": dict(reversed(AGREED.items()))}
    changed = {phase: dict.fromkeys(AGREED[phase], "other") for phase in list(AGREED)[first:]}
    left, right = write(tmp_path / "left", backwards), write(tmp_path / "right", step(1, **changed))
    difference = first_difference(left, right)
    assert difference is not None
    assert difference.phase == list(AGREED)[first]
    assert difference.tensor == next(iter(AGREED[difference.phase]))
    assert difference.num_tensors == len(AGREED[difference.phase])


def test_the_order_in_the_file_decides_which_tensor_is_first_and_all_are_counted(tmp_path: Path) -> None:
    left = write(tmp_path / "left", step(1, state={"z": "1", "a": "1"}))
    right = write(tmp_path / "right", step(1, state={"z": "2", "a": "2"}))
    assert str(first_difference(left, right)) == "step 1, state: z (and 1 more)"


def test_a_tensor_that_only_one_trace_has_is_a_difference(tmp_path: Path) -> None:
    less = write(tmp_path / "less", step(1, state={"model/w": "e"}))
    more = write(tmp_path / "more", step(1))
    for left, right in ((less, more), (more, less)):
        assert str(first_difference(left, right)) == "step 1, state: model/b"


def test_of_a_repeated_step_the_last_counts(tmp_path: Path) -> None:
    left = write(tmp_path / "left", step(1), step(2))
    right = write(tmp_path / "right", step(1), step(2, loss={"loss": "9"}), step(2))
    assert first_difference(left, right) is None


def test_a_trace_of_the_earlier_format_is_compared_by_its_state(tmp_path: Path) -> None:
    new = write(tmp_path / "new", step(1), step(2))
    agreed = write(tmp_path / "agreed", {"step": 1, "tensors": AGREED["state"]})
    other = write(tmp_path / "other", {"step": 1, "tensors": {"model/w": "e", "model/b": "other"}})
    assert first_difference(agreed, new) is None
    assert str(first_difference(other, new)) == "step 1, state: model/b"


def test_traces_must_exist_and_have_a_step_in_common(tmp_path: Path) -> None:
    empty, full = write(tmp_path / "empty"), write(tmp_path / "full", step(1))
    with pytest.raises(UserError, match="no step in common"):
        first_difference(empty, full)
    with pytest.raises(UserError, match="nowhere: no such trace"):
        first_difference(tmp_path / "nowhere", full)
