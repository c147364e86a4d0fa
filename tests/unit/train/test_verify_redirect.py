"""Under `lockstep verify`, a run is redirected, traced, and stopped after a number of steps."""

from pathlib import Path

import pytest

from lockstep.config import environment
from lockstep.config.environment import VerifyRequest
from lockstep.supervision.step_recorder import StepRecorder
from lockstep.train import verify_redirect
from lockstep.train.verify_redirect import flat_name, run_place


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in environment.verify_variables(VerifyRequest(tmp_path / "ranks", tmp_path / "runs", 5)).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(verify_redirect, "replace_recorder_by_run", StepRecorder().replace_by_run)
    return tmp_path


def test_without_verify_the_given_folder_is_used(tmp_path: Path) -> None:
    assert run_place(tmp_path, trace=False) == (tmp_path, None, None)
    assert run_place(str(tmp_path), trace=True) == (tmp_path, tmp_path / "digests.jsonl", None)
    assert run_place(None, trace=False) == (None, None, None)


def test_a_config_has_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.verify_variables(VerifyRequest(tmp_path)).items():
        monkeypatch.setenv(name, value)
    assert run_place(tmp_path / "run", trace=False) == (tmp_path / "run", None, None)


def test_a_scripts_folder_is_left_alone(watched: Path) -> None:
    place = run_place("runs/mine", trace=False)
    assert place == (watched / "runs" / "runs_mine", watched / "runs" / "runs_mine" / "digests.jsonl", 5)
    assert run_place("runs/mine", trace=False) == place, "a script may open the same run twice"
    assert run_place("runs/other", trace=False).folder != place.folder
    assert run_place(None, trace=False) == (None, None, None), "a part of the run that has a folder"


def test_runs_without_a_folder_are_numbered(watched: Path) -> None:
    assert [run_place(None, trace=False) for _ in range(2)] == [
        (None, watched / "ranks" / "run-1.jsonl", 5),
        (None, watched / "ranks" / "run-2.jsonl", 5),
    ]


def test_names() -> None:
    assert flat_name(Path("runs/mine")) == "runs_mine"
    assert flat_name(Path("/a b/ü.1")) == "a_b_ü.1"
    assert flat_name(Path("/")) == "run"
