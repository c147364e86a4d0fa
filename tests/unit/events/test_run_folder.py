"""A run claims its folder once; nothing that is there is ever overwritten."""

import json
from pathlib import Path

import pytest

from lockstep.config.schema import BatchConfig, Config, OptimConfig
from lockstep.errors import UserError
from lockstep.events.event import Events
from lockstep.events.jsonl import JsonLines
from lockstep.events.run_folder import RunFolder


def config(lr: float = 1e-3) -> Config:
    return Config(recipe="digits", epochs=1, batch=BatchConfig(global_batch=8), optim=OptimConfig(lr=lr))


def test_a_new_folder_gets_its_facts_and_the_resolved_config(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "a")
    assert folder.claim(config(), {"torch": "x"}) == 1
    facts = json.loads(folder.facts.read_text())
    assert facts["format"] == 1
    assert facts["fingerprint"] == {"torch": "x"}
    assert {"run_id", "created", "config_digest"} <= facts.keys()
    assert Config.from_file(folder.config) == config()


def test_coming_back_counts_the_attempts(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a")
    for expected in (1, 2, 3):
        attempt = folder.claim(config(), {})
        assert attempt == expected
        events = Events([JsonLines(folder.events)], attempt)
        events.emit("start", 0)
        events.close()


def test_another_config_is_refused_with_the_difference(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a")
    folder.claim(config(), {})
    before = {path: path.read_bytes() for path in folder.path.iterdir()}
    with pytest.raises(UserError, match=r"another config.*--run\n  optim.lr: 0.001 → 0.003"):
        folder.claim(config(lr=3e-3), {})
    assert {path: path.read_bytes() for path in folder.path.iterdir()} == before


def test_a_folder_that_is_not_a_runs_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="not a run folder"):
        RunFolder(tmp_path).claim(config(), {})
    with pytest.raises(UserError, match="not a run folder"):
        RunFolder(tmp_path / "thesis.tex").claim(config(), {})
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("content", ["", "{", '{"format": 99}'])
def test_damaged_facts_are_named(tmp_path: Path, content: str) -> None:
    folder = RunFolder(tmp_path)
    folder.facts.write_text(content)
    with pytest.raises(UserError, match=r"run\.json"):
        folder.claim(config(), {})


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the run folder"):
        RunFolder(tmp_path / "file" / "run").claim(config(), {})
