"""Which runs a script's verification makes, and what it makes of what they leave; without running anything."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from lockstep.errors import UserError
from lockstep.observe.verification import verifier
from lockstep.observe.verification.trials import Failure, Subject, TrialPlace
from lockstep.observe.verification.verdict import Verdict
from lockstep.observe.verification.verifier import verify_script

Runs = Mapping[str, list[str]]  # by name, the state after each step; "run-1" has no folder
Left = Callable[[str], Runs | Failure]  # by a trial of that name
Verify = Callable[[Left], tuple[Verdict, list[str]]]


@pytest.fixture
def verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Verify:
    def verify(left: Left) -> tuple[Verdict, list[str]]:
        def make(subject: Subject, place: TrialPlace) -> Failure | None:
            found = left(place.trial.name)
            for name, states in {} if isinstance(found, Failure) else found.items():
                is_bare = name.startswith("run-")
                trace = place.ranks(1) / f"{name}.jsonl" if is_bare else place.run / name / "digests.jsonl"
                trace.parent.mkdir(parents=True, exist_ok=True)
                lines = [{"step": step, "phases": {"state": {"w": state}}} for step, state in enumerate(states, 1)]
                trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
            return found if isinstance(found, Failure) else None

        monkeypatch.setattr(verifier, "make", make)
        told: list[str] = []
        verdict = verify_script(["train.py"], processes=2, steps=4, one_args=(), folder=tmp_path, tell=told.append)
        return verdict, told

    return verify


def test_with_a_folder_there_are_four_trials(verified: Verify) -> None:
    verdict, told = verified(lambda _: {"mine": list("abcd")})
    assert verdict.exit_code == 0
    assert [line.split("  ")[0] for line in told] == [
        "one process",
        "2 processes",
        "2 processes, stopped after step 2, resumed on one",
        "one process, stopped after step 2, resumed on 2",
    ]
    assert verdict.notes == ()


def test_without_a_folder_there_are_two(verified: Verify) -> None:
    verdict, told = verified(lambda _: {"run-1": list("abc")})
    assert (verdict.exit_code, len(told)) == (0, 2)
    assert verdict.notes == ("the script trains for 3 steps, fewer than the 4 that were asked for",)
    assert verdict.checks[-1].holds is None
    assert "no run folder" in verdict.checks[-1].evidence


def test_of_several_runs_the_one_that_differs_is_named(
    verified: Verify,
) -> None:
    verdict, _ = verified(lambda trial: {"first": list("ab"), "second": list("abcd" if trial == "one" else "abXd")})
    assert verdict.exit_code == 3
    assert verdict.lines()[0] == "different: 2 processes: second, first at step 3, in its state: w"


def test_a_run_that_makes_fewer_steps_on_several_processes(
    verified: Verify,
) -> None:
    verdict, told = verified(lambda trial: {"run-1": list("abcd" if "one" in trial else "ab")})
    assert verdict.exit_code == 3
    assert "after the last step: 4 steps and 2" in verdict.lines()[0]
    assert told[-1].split("  ")[0] == "one process, once more"


def test_a_folder_with_another_name_each_time(verified: Verify) -> None:
    with pytest.raises(UserError, match=r"other folders each time \(of-one; of-many\)") as error:
        verified(lambda trial: {f"of-{trial}": ["a"]})
    assert "give them names that stay" in str(error.value)


def test_a_run_that_fails_before_its_first_step(verified: Verify) -> None:
    verdict, _ = verified(lambda trial: {"mine": ["a", "b"]} if trial == "one" else Failure(5, "a hang"))
    assert (verdict.exit_code, verdict.failure) == (5, (5, "a hang"))
    assert [check.holds for check in verdict.checks] == [True, False]


def test_where_nothing_was_trained(verified: Verify) -> None:
    with pytest.raises(UserError, match="one process: nothing was trained"):
        verified(lambda _: {})
