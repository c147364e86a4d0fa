"""`lockstep plan` from a run folder, and its errors, without starting a process."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import LockstepError, UserError
from lockstep.events.run_folder import RUN_FORMAT_VERSION
from lockstep.plan.plan_command import plan
from tests.run_folders import timed, write_run


@pytest.fixture
def run(tmp_path: Path) -> str:
    """Write a run on one process, whose steps of four lanes take 0.4 s."""
    folder = write_run(tmp_path / "run", ranks={0: [timed(10, compute_s=0.4, num_lanes=4, **IDLE)]})
    run_info = {"run_id": "a", "format": RUN_FORMAT_VERSION, "fingerprint": {"lanes": 4}}
    (folder / "run.json").write_text(json.dumps(run_info))
    return str(folder)


IDLE = {"data_s": 0.0, "exchange_s": 0.0, "update_s": 0.0, "rest_s": 0.0}


def test_a_run_on_one_process_gives_upper_bounds(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan(run, nproc="2,4")
    heading, *rows, warning, remedy, advice = capsys.readouterr().out.splitlines()
    assert heading == "processes  lanes each       step  gradient wait  predicted speed-up     measured"
    assert [row.split()[:6] for row in rows] == [
        ["2", "2", "200.0", "ms", "0%", "×2.00"],
        ["4", "1", "100.0", "ms", "0%", "×4.00"],
    ]
    assert warning == "These are upper bounds: a run on one process says nothing about communication."
    assert remedy == "Plan from a run on two or more processes, or with --try 1,2."
    assert advice == "Worth it up to 4 processes, the largest number predicted."


def test_predictions_as_json(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan(run, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["lanes"], found["knows_travel"]) == (4, False)
    assert [each["processes"] for each in found["predictions"]] == [1, 2, 4]
    assert " ".join(found["predictions"][0]) == "processes lanes step_s exchange_s speed_up doubt measured error"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nproc": "8"}, "-n 8: the run has lanes=4, so at most 4 processes"),
        ({"nproc": "none"}, "-n none: expected numbers of processes, at most 65536, as in 1,2,4"),
        *(
            (option, "is a run: omit settings, --try, --measure and --steps, which apply to configs")
            for option in ({"tried": "4"}, {"measure": "4"}, {"steps": 4}, {"overrides": ["seed=1"]})
        ),
    ],
)
def test_options_that_do_not_fit_a_run(run: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(run, **options)
    assert str(caught.value).endswith(message)


def test_a_run_in_fast_mode_has_no_lanes_to_plan_with(run: str) -> None:
    run_info = {"run_id": "a", "format": RUN_FORMAT_VERSION, "fingerprint": {}}
    (Path(run) / "run.json").write_text(json.dumps(run_info))
    with pytest.raises(UserError, match="has no lanes: expected a training run in lockstep mode"):
        plan(run)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ("digits", {"tried": "1,x"}, "--try 1,x: expected numbers of processes"),
        ("digits", {"tried": "1,8"}, "8 processes cannot share lanes=4"),
        ("digits", {"nproc": "1,8"}, "8 processes cannot share lanes=4"),
        ("nothing", {}, "neither a file nor a built-in recipe"),
        ("wing", {}, "is searched, not trained"),
    ],
)
def test_configs_that_cannot_be_planned(config: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(LockstepError) as caught:
        plan(config, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
