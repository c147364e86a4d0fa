"""What the console shows of a run: lines, JSON, a progress bar, or nothing."""

import io
import json

from lockstep.events.event_log import Event, EventLog
from lockstep.observe.console import console_for, describe_event

START: Event = {
    "t": 0.0,
    "attempt": 1,
    "resumed": None,
    "step": 0,
    "kind": "start",
    "recipe": "digits",
    "processes": 2,
    "device": "cpu",
    "backend": "gloo",
    "launcher": "lockstep",
    "effective_batch": 64,
    "lanes": 8,
    "speed_up_bound": 2.0,
    "total_steps": 10,
    "parallel": "zero",
    "why_parallel": "as configured",
    "precision": "bf16",
    "learning_rates": [0.001, 0.0001, 0.001],
    "parameters": 1234,
    "folder": "runs/a",
}


def test_the_start_names_processes_and_the_effective_batch() -> None:
    lines = describe_event(START)
    assert lines[0] == "Initialized DDP with 2 processes (gloo, cpu)"
    assert "effective batch 64 = 8 lanes × 8 on 2 processes (speed-up at most ×2)" in lines[1]
    assert "learning rate 0.001 and 0.0001 in bf16" in lines[1]
    assert "runs/a" in lines[1]
    assert lines[2] == "parallel: zero (as configured)"


def test_an_uneven_share_bounds_the_speed_up() -> None:
    assert "speed-up at most ×2.67" in describe_event(START | {"processes": 3, "speed_up_bound": 8 / 3})[1]


def test_a_worker_of_another_launcher_says_so() -> None:
    assert "supervised by the launcher that started them (torchrun)" in "\n".join(
        describe_event(START | {"launcher": "torchrun"})
    )


def test_a_single_process_claims_no_process_group() -> None:
    assert "Initialized" not in "\n".join(describe_event(START | {"backend": None, "processes": 1, "launcher": "none"}))


def test_a_second_attempt_without_a_checkpoint_says_so() -> None:
    assert "attempt 2: no checkpoint" in "\n".join(describe_event(START | {"attempt": 2}))


def test_a_resumed_run_names_its_checkpoint() -> None:
    resumed = START | {"attempt": 2, "step": 40, "resumed": "runs/a/checkpoints/step-40"}
    assert "resumed at step 40 from runs/a/checkpoints/step-40" in "\n".join(describe_event(resumed))
    finished = describe_event(resumed | {"is_done": True})
    assert finished[1] == "nothing left to do: the run has finished after step 40 (runs/a/checkpoints/step-40)"


def test_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    (console,) = console_for(stream)
    events = EventLog([console])
    events.emit("step", 3, loss=float("nan"))
    events.emit("eval", 3, epoch=1, metrics={"accuracy": 0.5})
    events.emit("incident", 4)
    assert stream.getvalue().splitlines() == [
        "step      3  loss nan",
        "step      3  epoch   1  test: accuracy 0.5000",
        "incident at step 4",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal_with_the_result_below_it() -> None:
    terminal = Terminal()
    (console,) = console_for(terminal)
    console.emit(START)
    console.emit({"kind": "step", "step": 10, "loss": 0.25})
    console.emit({"kind": "end", "step": 10, "metrics": {"accuracy": 0.5}, "folder": "runs/a", "digest": "3f"})
    console.close()
    shown = terminal.getvalue()
    assert "effective batch 64" in shown
    assert "10/10" in shown
    assert "loss 0.2500" in shown
    assert shown.rstrip().endswith("done after 10 steps: test accuracy 0.5000  → runs/a\ndigest 3f")


def test_json_lines_are_the_events() -> None:
    stream = io.StringIO()
    (console,) = console_for(stream, as_json=True)
    console.emit(START)
    assert json.loads(stream.getvalue()) == START


SEARCH_STEP: Event = {
    "t": 0.0,
    "attempt": 1,
    "step": 3,
    "kind": "step",
    "generation": 3,
    "found": {"cost": 12.845},
    "front": None,
    "median": {"cost": 26.0},
    "failed": 1,
    "evaluated": 20,
    "evaluate_s": 0.5,
    "reasons": {"ValueError: too thin": 1},
    "design": {name: index for index, name in enumerate("abcdefg")},
}


def test_a_search_shows_its_generations_and_designs() -> None:
    start = START | {"total_rounds": 5, "genes": 7, "population": 20, "guided": False, "objectives": {"cost": "min"}}
    assert describe_event(start)[-1] == (
        "digits: 7 genes, 20 designs per generation, 5 generations, evolution only; cost (min) → runs/a"
    )
    assert describe_event(SEARCH_STEP) == [
        "generation    3  best cost 12.85  median cost 26  20 evaluated (1 failed) in 0.50 s",
        "    failed: ValueError: too thin (×1)",
        "    a 0, b 1, c 2, d 3, e 4, f 5",
        "    g 6",
    ]
    end = {"kind": "end", "step": 5, "metrics": None, "failures": 9, "evaluations": 9, "ended": "no more generations"}
    assert describe_event(end | {"design": None, "folder": "runs/a", "digest": "3f"}) == [
        "done after 5 generations, 9 evaluations (9 failed): no more generations",
        "every evaluation failed  → runs/a",
        "digest 3f",
    ]


def test_a_single_thing_is_in_the_singular() -> None:
    started = describe_event(START | {"effective_batch": 8, "lanes": 1, "total_steps": 1, "parameters": 1})[1]
    assert "digits: 1 parameter on cpu, effective batch 8 = 1 lane × 8 on 2 processes" in started
    assert ", 1 step → runs/a" in started
    end = {"kind": "end", "step": 1, "metrics": {"accuracy": 0.5}, "folder": "runs/a", "digest": "3f"}
    assert describe_event(end)[0] == "done after 1 step: test accuracy 0.5000  → runs/a"


def test_the_length_of_a_stream_is_not_known() -> None:
    assert "in bf16 → runs/a" in describe_event(START | {"total_steps": None})[1]


def test_quiet_is_silent() -> None:
    assert console_for(io.StringIO(), quiet=True) == []


def test_a_step_shows_its_loss_its_texts_and_why_it_was_the_last() -> None:
    step = {"t": 0.0, "attempt": 1, "step": 3, "kind": "step"}
    assert describe_event(step | {"loss": 0.5}) == ["step      3  loss 0.5000"]
    assert describe_event(step | {"texts": {"sample": "two\nlines"}}) == ["sample:", "    two", "    lines"]
    assert describe_event(step | {"stopped": "no progress"}) == ["stopped: no progress"]
    assert describe_event(step | {"images": {"a": "media/a-3.png"}}) == []


def test_metrics_that_are_not_numbers_are_not_shown() -> None:
    event = {"t": 0.0, "attempt": 1, "step": 3, "kind": "eval", "epoch": 1}
    (line,) = describe_event(event | {"metrics": {"accuracy": 0.5, "confusion": [[1, 2], [3, 4]], "r2": "nan"}})
    assert line.endswith("test: accuracy 0.5000  r2 nan")


def test_an_incident_and_the_best_checkpoint_are_shown() -> None:
    event = {"t": 0.0, "attempt": 1, "step": 3}
    assert describe_event(event | {"kind": "incident", "text": "lane 2 has a NaN"}) == ["lane 2 has a NaN"]
    assert describe_event(event | {"kind": "checkpoint", "path": "a", "is_best": True}) == ["saved a, the best so far"]
    assert describe_event(event | {"kind": "checkpoint", "path": "a"}) == ["saved a"]
