"""A run folder is read as it grows, over several attempts, whatever its files contain."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import UserError
from lockstep.observe.run_record import RunReader, read_record
from tests.run_folders import append, event, finished_run, start, timed, write_run


def test_a_finished_run(tmp_path: Path) -> None:
    record = read_record(finished_run(tmp_path / "mine"))
    assert (record.name, record.step, record.total_steps, record.attempt) == ("mine", 40, 40, 1)
    assert (record.is_ended, record.digest, record.checkpoints.best_step) == (True, "ab" * 32, 40)
    assert list(record.curves) == ["loss", "lr", "test/accuracy"]
    assert [(point.step, point.mean) for point in record.curves["test/accuracy"].points()] == [(20, 0.4), (40, 0.8)]
    assert record.samples_per_s == pytest.approx(64 * 10 / 1.6)
    assert len(record.ranks.times()) == 2


def test_a_run_that_has_only_just_started(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("recipe: digits\n")
    (tmp_path / ".lock").write_text("process 1 on here\n")
    record = read_record(tmp_path)
    assert (record.run_info, record.start, record.step, record.is_ended) == ({}, {}, 0, False)


def test_new_events_are_read_on_the_next_call(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [start(), event("step", 10, loss=1.0)])
    reader = RunReader(folder)
    assert reader.read().step == 10
    append(folder / "events.jsonl", [event("step", 20, loss=0.5), event("incident", 20, text="a disk is full")])
    append(folder / "ranks" / "0.jsonl", [timed(20)])
    record = reader.read()
    assert (record.step, len(record.curves["loss"].points())) == (20, 2)
    assert [incident.text for incident in record.incidents] == ["a disk is full"]
    assert len(record.ranks.times()) == 1


def test_a_folder_that_is_used_by_another_run_is_read_from_the_start(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [start(), event("step", 30, loss=1.0)])
    reader = RunReader(folder)
    assert reader.read().step == 30
    (folder / "events.jsonl").unlink()
    append(folder / "events.jsonl", [start()])
    assert reader.read().step == 0


def test_after_a_restart_the_repeated_steps_count(tmp_path: Path) -> None:
    first = [start(), *(event("step", step, loss=9.0) for step in (10, 20, 30))]
    second = [
        event("restart", 10, attempt=2, t=2000, cause="rank 1 was killed"),
        start(10, attempt=2, processes=1),
        event("step", 20, attempt=2, loss=1.0),
        event("step", 30, attempt=1, loss=9.0),  # from a process of the first attempt that was still alive
    ]
    record = read_record(write_run(tmp_path, first + second))
    assert [(point.step, point.mean) for point in record.curves["loss"].points()] == [(10, 9.0), (20, 1.0)]
    (restart,) = record.restarts
    assert (restart.step, restart.num_lost, restart.num_processes) == (10, 20, 1)
    assert restart.cause == "rank 1 was killed"
    assert (record.attempt, record.step) == (2, 20)


def test_a_loop_that_starts_several_times_is_not_restarted(tmp_path: Path) -> None:
    record = read_record(write_run(tmp_path, [start(), event("step", 10, loss=1.0), start(10)]))
    assert record.num_restarts == 0
    assert record.curves["loss"].last is not None


def test_reports_of_the_launcher_are_incidents(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [start()])
    (folder / "incidents").mkdir()
    report = {"kind": "crash", "t": 1500.0, "text": "rank 1 was killed", "ranks": {"0": {"step": 12}, "1": None}}
    (folder / "incidents" / "20300101-000000-crash.json").write_text(json.dumps(report))
    (folder / "incidents" / "torn.json").write_text('{"text": "x')
    reader = RunReader(folder)
    for _ in range(2):  # reading again adds nothing
        assert [(incident.step, incident.text) for incident in reader.read().incidents] == [(12, "rank 1 was killed")]


def test_a_search_has_generations_and_designs(tmp_path: Path) -> None:
    objectives = {"mass": "min", "grip": "max"}
    first = {"t": 1.0, "attempt": 1, "step": 0, "kind": "start", "total_rounds": 2, "objectives": objectives}
    step = event("step", 1, generation=1, best={"mass": 1.0, "grip": 5.0}, found=None, evaluated=3, evaluate_s=0.5)
    folder = write_run(tmp_path, [first, step])
    (folder / "evaluations").mkdir()
    piece = {"generation": 0, "key": "0/0/a", "evaluations": [[1.0, 2.0], [3.0, 5.0], "it failed", [2.0, 1.0]]}
    append(folder / "evaluations" / "0.jsonl", [piece, piece])  # the same work twice, after a kill
    record = read_record(folder)
    assert (record.is_search, record.total_steps) == (True, 2)
    assert (record.designs.num, record.designs.num_failed) == (4, 1)
    (spread,) = record.designs.spreads(0)
    assert (spread.generation, spread.lowest, spread.median, spread.highest) == (1, 1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda _: None, "is not a folder"),
        (lambda folder: folder.write_text("x"), "is not a folder"),
        (lambda folder: (folder.mkdir(), (folder / "notes.txt").write_text("x")), "has no run.json"),
        (lambda folder: (folder.mkdir(), (folder / "run.json").write_text("{")), "is damaged"),
        (lambda folder: (folder.mkdir(), (folder / "run.json").write_text("[" * 100_000)), "is damaged"),
        (
            lambda folder: (folder.mkdir(), (folder / "run.json").write_text('{"run_id": "x", "format": 9}')),
            "format '9'",
        ),
    ],
)
def test_a_folder_that_is_not_a_run_is_an_error_of_one_line(tmp_path: Path, prepare: Any, message: str) -> None:
    prepare(tmp_path / "mine")
    with pytest.raises(UserError, match=message) as caught:
        read_record(tmp_path / "mine")
    assert "\n" not in str(caught.value)


HOSTILE: list[Any] = [
    None,
    [],
    {},
    {"kind": "step"},
    {"kind": "step", "step": "x", "attempt": 1, "t": 1},
    {"kind": "step", "step": -5, "attempt": 1, "t": 1, "loss": 1},
    {"kind": "step", "step": 5, "attempt": True, "t": 1, "loss": 1},
    {"kind": ["start"], "step": 5, "attempt": 1, "t": 1},
    {"kind": "step", "step": 5, "attempt": 1, "t": 1e400, "loss": 10**400},
    {"kind": "step", "step": 6, "attempt": 1, "t": 1, "images": ["x"], "texts": {"a": 3}, "loss": {"a": {"b": [1]}}},
    {"kind": "eval", "step": 7, "attempt": 1, "t": 1, "metrics": "good", "epoch": "one"},
    {"kind": "checkpoint", "step": 8, "attempt": 1, "t": 1, "num_bytes": "many", "stall_s": None},
    {"kind": "incident", "step": 9, "attempt": 1, "t": 1, "text": {"a": 1}},
    {"kind": "start", "step": 9, "attempt": 1, "t": 1, "processes": "two", "objectives": 3, "total_rounds": "x"},
    {"kind": "end", "step": 9, "attempt": 1, "t": 1, "digest": 5, "metrics": [1]},
]


def test_lines_that_no_run_writes_are_skipped(tmp_path: Path) -> None:
    folder = write_run(tmp_path, HOSTILE)
    (folder / "evaluations").mkdir()
    append(folder / "evaluations" / "0.jsonl", [*HOSTILE, {"generation": 0, "key": "k", "evaluations": [[], ["x"], 3]}])
    append(folder / "ranks" / "0.jsonl", [*HOSTILE, timed(10, compute_s=1e400), timed(20, sent_bytes="x")])
    append(folder / "ranks" / "notes.jsonl", [timed(10)])
    (folder / "ranks" / "1.jsonl").symlink_to("/etc/passwd")
    os.mkfifo(folder / "ranks" / "2.jsonl")
    record = read_record(folder)
    assert record.step == 9
    assert [times.num_timed for times in record.ranks.times()] == [1]
    assert record.designs.num_failed == 3


def test_curves_and_names_are_bounded(tmp_path: Path) -> None:
    many = {f"value{number}": number for number in range(1000)}
    texts = {f"text{number}": "x" for number in range(1000)}
    record = read_record(write_run(tmp_path, [event("step", 1, **many, texts=texts)]))
    assert len(record.curves) == 200
    assert len(record.texts) == 50
