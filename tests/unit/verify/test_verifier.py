"""Which trials a script is verified with, and what is concluded from their files, without running anything."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from lockstep.errors import UserError
from lockstep.verify import verifier
from lockstep.verify.verifier import verify_script
from lockstep.verify.verify_trials import TrialFailure, TrialFiles, VerifySubject
from lockstep.verify.verify_verdict import VerifyVerdict

Runs = Mapping[str, list[str]]  # by name, the state after each step; "run-1" has no folder
Left = Callable[[str], Runs | TrialFailure]  # by a trial of that name
Verify = Callable[[Left], tuple[VerifyVerdict, list[str]]]


@pytest.fixture
def verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Verify:
    def verify(left: Left) -> tuple[VerifyVerdict, list[str]]:
        def run_trial(subject: VerifySubject, files: TrialFiles) -> TrialFailure | None:
            found = left(files.trial.name)
            for name, states in {} if isinstance(found, TrialFailure) else found.items():
                is_bare = name.startswith("run-")
                trace = files.rank_folder(1) / f"{name}.jsonl" if is_bare else files.run / name / "digests.jsonl"
                trace.parent.mkdir(parents=True, exist_ok=True)
                lines = [{"step": step, "phases": {"state": {"w": state}}} for step, state in enumerate(states, 1)]
                trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
            return found if isinstance(found, TrialFailure) else None

        monkeypatch.setattr(verifier, "run_trial", run_trial)
        lines: list[str] = []
        verdict = verify_script(["train.py"], processes=2, steps=4, one_args=(), folder=tmp_path, report=lines.append)
        return verdict, lines

    return verify


def test_with_a_folder_there_are_four_trials(verified: Verify) -> None:
    verdict, reported = verified(lambda _: {"mine": list("abcd")})
    assert verdict.exit_code == 0
    assert [line.split("  ")[0] for line in reported] == [
        "one process",
        "2 processes",
        "2 processes, stopped after step 2, resumed on one",
        "one process, stopped after step 2, resumed on 2",
    ]
    assert verdict.notes == ()


def test_without_a_folder_there_are_two_trials(verified: Verify) -> None:
    verdict, reported = verified(lambda _: {"run-1": list("abc")})
    assert (verdict.exit_code, len(reported)) == (0, 2)
    assert verdict.notes == ("the script trains for 3 steps, fewer than the 4 asked for",)
    assert verdict.checks[-1].holds is None
    assert "no run folder" in verdict.checks[-1].evidence


def test_of_several_runs_the_one_that_differs_is_named(verified: Verify) -> None:
    verdict, _ = verified(lambda trial: {"first": list("ab"), "second": list("abcd" if trial == "one" else "abXd")})
    assert verdict.exit_code == 6
    assert verdict.lines()[0] == "different: 2 processes: second, first at step 3, in its state: w"


def test_a_run_that_makes_fewer_steps_on_several_processes(verified: Verify) -> None:
    verdict, reported = verified(lambda trial: {"run-1": list("abcd" if "one" in trial else "ab")})
    assert verdict.exit_code == 6
    assert "after the last step: 4 steps and 2" in verdict.lines()[0]
    assert "when the loop ends depends on the processes" in verdict.lines()[1]
    assert str(verdict.checks[1]) == "[!] 2 processes train: 2 steps, but 4 on one process"
    assert reported[-1].split("  ")[0] == "one process, once more"


def test_folders_with_different_names_each_time_are_refused(verified: Verify) -> None:
    with pytest.raises(UserError, match=r"different folders each time \(of-one; of-many\)") as error:
        verified(lambda trial: {f"of-{trial}": ["a"]})
    assert "give them fixed names" in str(error.value)


def test_a_run_that_fails_before_its_first_step(verified: Verify) -> None:
    verdict, _ = verified(lambda trial: {"mine": ["a", "b"]} if trial == "one" else TrialFailure(5, "a hang"))
    assert (verdict.exit_code, verdict.failure) == (5, (5, "a hang"))
    assert [check.holds for check in verdict.checks] == [True, False]


def test_a_script_that_trains_nothing_is_refused(verified: Verify) -> None:
    with pytest.raises(UserError, match="one process: nothing was trained"):
        verified(lambda _: {})
