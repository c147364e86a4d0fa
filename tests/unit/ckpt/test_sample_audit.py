"""The audit reads ledger, manifests and events, trusts none of them, and describes faults in one line each."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.ckpt.sample_audit import audit_samples
from lockstep.errors import UserError
from lockstep.events.jsonl import JsonlWriter
from tests.unit.ckpt.run_history import History, Line


def test_the_summary(history: History) -> None:
    for processes, num_batches in ((4, 7), (1, 8), (2, 3)):
        history.processes = processes
        history.consume(history.loaders(22, 4), num_batches)
        history.commit()
        history.kill()
    assert str(history.audit()) == (
        "3 finished epochs: each of 22 samples exactly once or dropped (2 per epoch); 54% of epoch 4; "
        "3 commits over 3 attempts on 4, 1 and 2 processes"
    )


def test_undone_commits_are_not_audited_but_counted(history: History) -> None:
    loaders = history.loaders(20, 4)
    for _ in range(3):
        history.consume(loaders, 2)
        history.commit()
    history.kill(back=2)
    history.consume(loaders, 3)
    history.commit()
    found = history.audit()
    assert found.faults == ()
    assert (found.num_commits, found.num_undone) == (2, 2)
    assert str(found).endswith("2 commits over 2 attempts on 1 process (2 more were undone)")


def test_a_line_that_the_ledger_lacks_is_taken_from_the_manifest(history: History) -> None:
    loaders = history.loaders(20, 4)
    for number in range(3):
        history.consume(loaders, 2)
        history.commit(checkpoint=True, line=number == 1)
    found = history.audit()
    assert (found.faults, found.num_commits) == ((), 3)


def test_a_commit_that_neither_has_is_a_fault(finished: History) -> None:
    lines = finished.lines()
    finished.rewrite(lines[:2] + lines[3:])
    (fault,) = finished.audit().faults
    assert f"has the parent {lines[2]['commit']}, which is neither in the ledger nor a checkpoint" in fault


def test_a_ledger_that_differs_from_the_manifest(history: History) -> None:
    history.consume(history.loaders(20, 4), 2)
    history.commit(checkpoint=True)
    lines = history.lines()
    lines[0]["spans"][0]["batches"] = [0, 3]
    lines[0]["spans"][0]["consumed"] = [[0, 0, 12]]
    history.rewrite(lines)
    (fault,) = history.audit().faults
    assert "its line of commit" in fault
    assert "differs from the checkpoint's manifest" in fault


def test_a_checkpoint_with_more_batches_than_its_ledger(history: History) -> None:
    history.consume(history.loaders(20, 4), 2)
    history.commit(checkpoint=True, position={"batches": 3})
    (fault,) = history.audit().faults
    assert "its checkpoint has consumed 3 batches, the ledger lists 2" in fault


def test_altered_events_are_found(history: History) -> None:
    events, loaders = history.folder / "events.jsonl", history.loaders(20, 4)
    lines = JsonlWriter(events)
    for step in range(4):
        lines.emit({"kind": "step", "step": step})
        history.consume(loaders, 1)
        history.commit(checkpoint=True, events=lines.mark()._asdict())
    lines.emit({"kind": "end"})
    lines.close()
    assert history.audit().faults == ()
    whole = events.read_bytes()
    size = len(whole) // 5
    events.write_bytes(whole.replace(b'"step": 2', b'"step": 9'))
    (fault,) = history.audit().faults
    assert re.fullmatch(r"events.jsonl was altered between bytes \d+ and \d+, after step 3 was saved", fault)
    events.write_bytes(whole[: 2 * size])
    assert "shorter than when step" in history.audit().faults[0]
    events.unlink()
    assert "events.jsonl is missing" in history.audit().faults[0]


def in_third_line(change: Callable[[Line], Any]) -> Callable[[list[Line]], None]:
    return lambda lines: change(lines[2])


def set_data(name: str, value: Any) -> Callable[[list[Line]], None]:
    return lambda lines: [line["spans"][0]["data"].__setitem__(name, value) for line in lines] and None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_data("length", 2**31 + 1), "2147483649 samples: expected 1 to 2,147,483,648"),
        (set_data("length", -1), "-1 samples"),
        (set_data("length", True), "True samples"),
        (set_data("length", {"a": 1}), "dict samples"),
        (set_data("global_batch", 0), "global batch is 0"),
        (set_data("global_batch", 21), "more than the data set's 20"),
        (set_data("tail", ["drop"]), "tail is list"),
        (set_data("tail", "\x1b[2J"), "tail is '\\x1b[2J'"),
        (set_data("seed", 1.5), "no seed"),
        (set_data("shuffle", "yes"), "no seed, or does not record whether it is shuffled"),
        (in_third_line(lambda line: line.update(commit="../x")), "does not name its commit in hex"),
        (in_third_line(lambda line: line.update(commit=None)), "does not name its commit in hex"),
        (in_third_line(lambda line: line.update(parent=7)), "has the parent 7, which is not the name of a commit"),
        (in_third_line(lambda line: line.update(step=-1)), "-1 in step"),
        (in_third_line(lambda line: line.update(attempt=2**61)), "in attempt"),
        (in_third_line(lambda line: line.update(processes=0)), "0 in processes"),
        (in_third_line(lambda line: line.update(processes="2")), "2 in processes"),
        (in_third_line(lambda line: line.update(spans={})), "no list of spans"),
        (in_third_line(lambda line: line.update(spans=[7])), "does not describe its data"),
        (in_third_line(lambda line: line["spans"][0].update(data=[])), "does not describe its data"),
        (in_third_line(lambda line: line["spans"][0].update(batches=[4])), "1 numbers for a span's batches"),
        (
            in_third_line(lambda line: line["spans"][0].update(batches=[4, 4])),
            "4 in batches: expected a whole number from 5",
        ),
        (in_third_line(lambda line: line["spans"][0].update(batches=[4.0, 6.0])), "4.0 in batches"),
        (in_third_line(lambda line: line["spans"][0].update(consumed=[[0, 1]])), "not [epoch, start, stop]"),
        (in_third_line(lambda line: line["spans"][0].update(consumed=[[0, 8, 2**40]])), f"{2**40} in consumed"),
        (in_third_line(lambda line: line["spans"][0].update(consumed=[[-1, 0, 8]])), "-1 in consumed"),
        (
            in_third_line(lambda line: line["spans"][0].update(consumed=[[0, 0, 2**31]])),
            "positions were used that no batch reaches",
        ),
        (in_third_line(lambda line: line["spans"][0].update(consumed=[[2**59, 0, 8]])), "no batch reaches it"),
        (in_third_line(lambda line: line["spans"][0].update(batches=[4, 2**59])), "more epochs: no sample was used"),
        (in_third_line(lambda line: line.update(parent=line["commit"])), "form a cycle"),
        (lambda lines: lines[0].update(parent=lines[3]["commit"]), "form a cycle"),
        (lambda lines: lines[0].update(parent=lines[-1]["commit"]), "none of them is the newest"),
        (lambda lines: lines.append({**lines[1], "processes": 5}), "twice, with different contents"),
        (lambda lines: lines[1].update(attempt=9), "of attempt 1 has the parent"),
        (lambda lines: lines[:] and lines.__setitem__(0, {"commit": "0", "x": [[]] * 100}), "no list of spans"),
    ],
)
def test_a_forged_ledger_is_a_clear_line(finished: History, change: Callable[[list[Line]], None], message: str) -> None:
    lines = finished.lines()
    change(lines)
    finished.rewrite(lines)
    faults = finished.audit().faults
    assert any(message in fault for fault in faults), faults
    assert all(len(fault) < 600 and fault.isprintable() for fault in faults)


def test_only_the_first_faults_of_a_long_ledger_are_listed(finished: History) -> None:
    finished.rewrite([{"commit": "?"}] * 1000)
    faults = finished.audit().faults
    assert len(faults) == 51
    assert faults[-1] == "950 more faults are not listed"


def test_a_ledger_that_is_too_long_is_not_read(finished: History) -> None:
    with finished.ledger.open("ab") as file:
        file.truncate(2**28 + 1)  # sparse
    assert "at most 268,435,456 are read" in finished.audit().faults[0]


def test_nothing_to_audit(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run folder"):
        audit_samples(tmp_path)
    (tmp_path / "ledger.jsonl").write_text('{"torn')
    with pytest.raises(UserError, match="has not committed a checkpoint yet"):
        audit_samples(tmp_path)


def test_a_damaged_manifest_is_a_note(history: History) -> None:
    history.consume(history.loaders(20, 4), 2)
    history.commit(checkpoint=True)
    (history.folder / "checkpoints" / "step-2" / "manifest.json").write_text("{}")
    found = history.audit()
    assert found.faults == ()
    assert "manifest.json has format None" in found.notes[0]
