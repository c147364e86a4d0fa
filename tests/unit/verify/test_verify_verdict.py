"""The verdict on four runs: its lines, exit code and likely cause."""

import json

import pytest

from lockstep.command_line.trial_runs import check_trial_config
from lockstep.config.train_schema import BatchConfig, Config
from lockstep.errors import UserError
from lockstep.events.step_trace import TraceDifference
from lockstep.verify.checklist import ChecklistItem
from lockstep.verify.verifier import compare_ends
from lockstep.verify.verify_trials import (
    TrialFailure,
    VerifyTrial,
    first_trial,
    repeated_trial,
    resumed_trials,
    second_trial,
)
from lockstep.verify.verify_verdict import VerifyFinding, VerifyVerdict


def trials(processes: int, steps: int) -> list[VerifyTrial]:
    return [first_trial(), second_trial(processes), *resumed_trials(processes, steps)]


ONE, MANY, MANY_THEN_ONE, ONE_THEN_MANY = trials(processes=2, steps=8)


def verdict(**differences: TraceDifference) -> VerifyVerdict:
    return VerifyVerdict(
        tuple(
            VerifyFinding(trial, "abc", differences.get(trial.name.replace("-", "_")))
            for trial in (ONE, MANY, MANY_THEN_ONE, ONE_THEN_MANY)
        )
    )


def test_the_four_trials() -> None:
    assert [[tuple(segment) for segment in trial.segments] for trial in trials(processes=3, steps=9)] == [
        [(1, None)],
        [(3, None)],
        [(3, 4), (1, None)],
        [(1, 4), (3, None)],
    ]


def test_all_agree() -> None:
    assert verdict().exit_code == 0
    assert verdict().cause is None
    assert verdict().lines() == ["all 4 agree, bit for bit: digest abc"]
    assert verdict().as_json()["equal"] is True


@pytest.mark.parametrize(
    ("phase", "cause"),
    [("data", "augmentation"), ("loss", "forward"), ("gradient", "backward"), ("state", "optimizer")],
)
def test_the_first_difference_is_reported_with_the_cause_of_its_phase(phase: str, cause: str) -> None:
    found = verdict(many=TraceDifference(1, phase, "it", 3), many_then_one=TraceDifference(2, "state", "other", 1))
    assert found.exit_code == 6
    line, why = found.lines()
    assert line == f"different: 2 processes: first at step 1, in its {phase}: it and 2 more"
    assert cause in why
    assert "one process" not in why
    assert json.loads(json.dumps(found.as_json()))["trials"][1]["difference"] == {
        "step": 1,
        "phase": phase,
        "tensor": "it",
        "num_tensors": 3,
    }


def test_one_process_that_does_not_repeat_itself() -> None:
    found = verdict(many=TraceDifference(1, "loss", "loss", 1), one_then_many=TraceDifference(4, "loss", "loss", 1))
    assert "Two runs on one process differ as well" in found.lines()[1]
    later = verdict(many=TraceDifference(1, "loss", "loss", 1), one_then_many=TraceDifference(5, "loss", "loss", 1))
    assert "Two runs on one process" not in later.lines()[1], "from step 5 on there were two processes"


def test_a_script_that_does_not_repeat_itself_on_one_process() -> None:
    differing = VerifyFinding(MANY, "abc", TraceDifference(1, "start", "w", 1), size="by up to 1", cause="No seed.")
    again = VerifyFinding(repeated_trial(), "abc", TraceDifference(1, "start", "w", 1))
    assert VerifyVerdict((VerifyFinding(ONE, "abc"), differing, again)).lines() == [
        "different: 2 processes: first at step 1, in the weights before it: w, by up to 1",
        "No seed. Two runs on one process differ as well.",
    ]
    assert (
        VerifyVerdict((VerifyFinding(ONE, "abc"), differing, VerifyFinding(repeated_trial(), "abc"))).lines()[1]
        == "No seed."
    )


def test_the_checklist_comes_last_and_a_broken_promise_is_a_failure() -> None:
    checks = (
        ChecklistItem("a", True, "seen"),
        ChecklistItem("b", False, "not so"),
        ChecklistItem("c", None, "no folder"),
    )
    found = VerifyVerdict((VerifyFinding(ONE, "abc"), VerifyFinding(MANY, "abc")), checks, ("it was short",))
    assert found.lines()[1:] == ["it was short", "[x] a: seen", "[!] b: not so", "[ ] c: not checked: no folder"]
    assert found.exit_code == 0, "printing on the wrong rank changes no bits"
    assert [check["holds"] for check in found.as_json()["checklist"]] == [True, False, None]
    broken = ChecklistItem("it loads", False, "it does not", is_promise=True)
    assert VerifyVerdict(found.findings, (broken,)).exit_code == 6


@pytest.mark.parametrize("name", ["many_then_one", "one_then_many"])
def test_only_after_the_resume(name: str) -> None:
    assert "not in the checkpoint" in (verdict(**{name: TraceDifference(5, "loss", "loss", 1)}).cause or "")
    assert "not in the checkpoint" not in (verdict(**{name: TraceDifference(4, "loss", "loss", 1)}).cause or "")


def test_a_run_that_failed_is_reported_with_its_own_exit_code() -> None:
    found = VerifyVerdict((VerifyFinding(ONE, "abc"), VerifyFinding(MANY, failure=TrialFailure(4, "it was drift"))))
    assert found.exit_code == 4
    assert found.lines() == [
        "failed: 2 processes ended with exit code 4 before the end of its first step, so there is no result to "
        "compare; the run's own output is on standard error"
    ]
    assert found.result == "failed"
    assert found.failure == (4, "it was drift")
    assert found.findings[1].summary == "failed with exit code 4"
    assert found.as_json()["equal"] is False
    differing = VerifyVerdict(
        (
            VerifyFinding(ONE, "abc"),
            VerifyFinding(MANY, None, TraceDifference(1, "state", "w", 1), TrialFailure(3, "apart")),
        )
    )
    assert differing.exit_code == 3
    assert differing.lines()[1] == "different: 2 processes: first at step 1, in its state: w"


def test_rounding_is_no_failure_and_no_acquittal_of_one() -> None:
    rounded = VerifyFinding(
        MANY, "b", TraceDifference(1, "gradient", "w", 2), is_rounding=True, steps=4, size="by up to 1e-9", cause="Why."
    )
    found = VerifyVerdict((VerifyFinding(ONE, "a", steps=4), rounded))
    assert (found.result, found.exit_code) == ("rounding", 0)
    assert rounded.summary == "the same except for rounding, first at step 1, gradient: w (and 1 more)"
    assert found.lines() == [
        "rounding: 2 processes: first at step 1, in its gradient: w and 1 more, by up to 1e-9",
        "Why.",
    ]
    assert found.as_json()["equal"] is False
    failed = VerifyVerdict((VerifyFinding(ONE, "a", steps=4), rounded._replace(failure=TrialFailure(5, "a hang"))))
    assert (failed.result, failed.exit_code) == ("failed", 5)
    (line,) = failed.lines()
    assert line.startswith(
        "failed: 2 processes ended with exit code 5 after step 4, so there is no result to compare; "
    )
    assert "until then it differs by rounding alone" in line


def test_ends_that_differ_although_no_step_does() -> None:
    end = {"step": 8, "digest": "a"}
    assert compare_ends(end, dict(end)) is None
    state = compare_ends(end, end | {"digest": "b"})
    assert state == (8, "end", "the state", 1)
    assert "after the last step: the state" in verdict(many=state).lines()[0]
    fewer = compare_ends(end, {"step": 6, "digest": "b"})
    assert fewer == (6, "end", "8 steps and 6", 1)


def test_configs_that_promise_no_bits_are_refused() -> None:
    check_trial_config(Config(epochs=1, batch=BatchConfig(global_batch=8)))
    with pytest.raises(UserError, match="determinism=fast does not promise equal bits"):
        check_trial_config(Config(epochs=1, batch=BatchConfig(global_batch=8), determinism="fast"))
    with pytest.raises(UserError, match=r"batch.per_device=8: the batch would depend on.*batch.global"):
        check_trial_config(Config(epochs=1, batch=BatchConfig(per_device=8)))
