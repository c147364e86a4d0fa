"""Where a run goes when somebody looks at its script: elsewhere, traced, for so many steps."""

from pathlib import Path

import pytest

from lockstep.config import environment
from lockstep.config.environment import Observation
from lockstep.train import observed
from lockstep.train.observed import observed_name, place_of


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in environment.observing(Observation(tmp_path / "ranks", tmp_path / "runs", 5)).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(observed, "_made", [])
    return tmp_path


def test_where_nobody_looks_it_goes_where_it_is_told(tmp_path: Path) -> None:
    assert place_of(tmp_path, trace=False) == (tmp_path, None, None)
    assert place_of(str(tmp_path), trace=True) == (tmp_path, tmp_path / "digests.jsonl", None)
    assert place_of(None, trace=False) == (None, None, None)


def test_a_config_has_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.observing(Observation(tmp_path)).items():
        monkeypatch.setenv(name, value)
    assert place_of(tmp_path / "run", trace=False) == (tmp_path / "run", None, None)


def test_a_scripts_folder_is_left_alone(watched: Path) -> None:
    place = place_of("runs/mine", trace=False)
    assert place == (watched / "runs" / "runs_mine", watched / "runs" / "runs_mine" / "digests.jsonl", 5)
    assert place_of("runs/mine", trace=False) == place, "a script may open the same run twice"
    assert place_of("runs/other", trace=False).folder != place.folder
    assert place_of(None, trace=False) == (None, None, None), "a part of the run that has a folder"


def test_runs_without_a_folder_are_numbered(watched: Path) -> None:
    assert [place_of(None, trace=False) for _ in range(2)] == [
        (None, watched / "ranks" / "run-1.jsonl", 5),
        (None, watched / "ranks" / "run-2.jsonl", 5),
    ]


def test_names() -> None:
    assert observed_name(Path("runs/mine")) == "runs_mine"
    assert observed_name(Path("/a b/ü.1")) == "a_b_ü.1"
    assert observed_name(Path("/")) == "run"
