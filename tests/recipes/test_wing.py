"""The wing recipe through the real command: the same wing on one process and on two, with its pictures."""

import json
from pathlib import Path
from typing import Any

from lockstep.events.jsonl import read_jsonl
from tests.commands import LOCKSTEP, run

_PNG = b"\x89PNG\r\n\x1a\n"


def search(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    finished = run([*LOCKSTEP, "train", *arguments], folder)
    assert finished.code == 0, finished.err
    return list(read_jsonl(folder / "runs" / arguments[0].removesuffix(".json") / "events.jsonl"))


def test_one_process_and_two_find_the_same_wing_and_draw_it(tmp_path: Path) -> None:
    config = {
        "recipe": "wing",
        "max_generations": 4,
        "population_size": 19,  # which two processes cannot share evenly
        "save_frequency": 2,
        "max_runtime_hours": 1,
        "wing": {"panels": 24},
        "network": {"steps": 8},
    }
    (tmp_path / "two.json").write_text(json.dumps(config))
    (tmp_path / "one.json").write_text(json.dumps({**config, "wing": {"panels": 24, "pictures": False}}))
    two = search(tmp_path, "two.json", "-n", "2")
    one = search(tmp_path, "one.json")
    assert two[-1]["digest"] == one[-1]["digest"]
    assert [event["step"] for event in two if "generation" in event] == [1, 2, 3, 4]
    assert all(len(event["by_rank"]) == 2 for event in two if "generation" in event)
    assert two[-1]["metrics"]["fitness"] >= two[1]["best"]["fitness"]
    assert two[-1]["design"].keys() >= {"span", "ride_height", "slot_gap", "endplate_height"}
    for name in ("best-wing", "fitness", "front"):
        assert (tmp_path / "runs" / "two" / "pictures" / f"{name}.png").read_bytes().startswith(_PNG)
    assert not (tmp_path / "runs" / "one" / "pictures").exists()


def test_several_objectives_have_a_front(tmp_path: Path) -> None:
    events = search(tmp_path, "wing", "wing.objectives=pareto", "wing.panels=16", "--quick", "--run", "runs/wing")
    assert events[-1]["metrics"].keys() >= {"downforce", "drag"}
    assert events[-2]["kind"] == "checkpoint"
    fronts = [event["front"] for event in events if "generation" in event]
    assert fronts[-1] >= 1
