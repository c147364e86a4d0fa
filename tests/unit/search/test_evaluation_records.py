"""The records of finished evaluations, and how damaged records are read."""

from pathlib import Path

import pytest
import torch

from lockstep.search.evaluation_records import DesignBatch, EvaluationRecords
from lockstep.search.problem import Evaluation
from lockstep.world.world import World

DESIGNS = torch.arange(6.0, dtype=torch.float64).reshape(3, 2)
VALUES = [Evaluation((0.1 + 0.2, -0.0)), Evaluation(failure="no"), Evaluation((1e300, 5e-324))]


def recorded(folder: Path) -> DesignBatch:
    records, piece = EvaluationRecords(folder, World()), DesignBatch(2, 0, [0, 1, 2], DESIGNS)
    records.add(piece, VALUES, 0.5)
    records.add(DesignBatch(1, 0, [0], DESIGNS[:1]), VALUES[:1], 0.5)
    records.close()
    return piece


def test_evaluations_are_read_back_to_the_last_bit(tmp_path: Path) -> None:
    piece = recorded(tmp_path)
    found = EvaluationRecords(tmp_path, World()).find(2)
    assert found.keys() == {piece.key}  # and not what belongs to an earlier generation
    assert repr(found[piece.key]) == repr(VALUES)


def test_another_design_or_position_has_another_key() -> None:
    piece = DesignBatch(2, 0, [0, 1, 2], DESIGNS)
    assert piece.key != piece._replace(designs=DESIGNS + 1e-12).key
    assert piece.key != piece._replace(number=1).key


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "7", '{"generation": 3}', '{"generation": 3, "key": "k", "evaluations": [7]}',
     '{"generation": 3, "key": "k", "evaluations": [["x"]]}', '{"generation": "3", "key": "k", "evaluations": []}',
     '{"generation": 3, "key": 4, "evaluations": []}', '{"generation": 3, "key": "k", "evaluations": [[1.0'],
)  # fmt: skip
def test_damaged_lines_are_passed_over(tmp_path: Path, line: str) -> None:
    piece = recorded(tmp_path)
    file = tmp_path / "0.jsonl"
    file.write_text(file.read_text() + line)
    assert EvaluationRecords(tmp_path, World()).find(2).keys() == {piece.key}


def test_a_large_batch_is_read_back_as_well(tmp_path: Path) -> None:
    records, piece = (
        EvaluationRecords(tmp_path, World()),
        DesignBatch(0, 0, range(8000), torch.zeros(8000, 2, dtype=torch.float64)),
    )
    records.add(piece, [Evaluation(failure="x" * 200)] * 8000, 0.5)
    records.close()
    assert len(EvaluationRecords(tmp_path, World()).find(0)[piece.key]) == 8000


def test_without_a_folder_nothing_is_recorded(tmp_path: Path) -> None:
    records = EvaluationRecords(None, World())
    records.add(DesignBatch(0, 0, [0], DESIGNS[:1]), VALUES[:1], 0.5)
    assert records.find(0) == {}
    assert not list(tmp_path.iterdir())
