"""What `lockstep watch` shows on a terminal, and as lines where there is none."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.observe.curve import Curve
from lockstep.observe.step_timing import PHASE_LABELS
from lockstep.watch import terminal_screen
from lockstep.watch.run_follower import RunFollower
from tests.run_folders import append, event, start, timed, write_run


def shown(follower: RunFollower) -> str:
    console = Console(file=io.StringIO(), width=110)
    with console.capture() as captured:
        console.print(terminal_screen.render_run(follower.poll()))
    return captured.get()


def test_the_screen_has_progress_metrics_bars_and_findings(tmp_path: Path) -> None:
    waits = [timed(step, exchange_s=0.13) for step in (10, 20, 30, 40)]
    slow = [timed(step, compute_s=0.21) for step in (10, 20, 30, 40)]
    events = [
        start(),
        *(event("step", step, loss=4.0 / step) for step in (10, 20)),
        event("incident", 20, text="[red]no"),
    ]
    text = shown(RunFollower(write_run(tmp_path, events, {0: waits, 1: slow}), 0))
    for part in ("50%", "loss", "0.2", "rank 1 is slow", "[red]no", "3 s to go", *PHASE_LABELS.values()):
        assert part in text
    bars = [line for line in text.splitlines() if line.startswith("rank ") and "█" in line]
    assert [bar.count("░") for bar in bars] == [23, 4]  # of 48 characters: 130 and 20 of 270 ms


def test_a_curve_in_one_line() -> None:
    curve = Curve()
    for step, value in enumerate([0.0, 1.0, 2.0, 7.0]):
        curve.add(step, value)
    assert terminal_screen.sparkline(curve) == "▁▂▃█"


def test_it_waits_for_a_run_and_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sleep is a stage of the run."""
    folder = tmp_path / "mine"
    stages = iter(
        [
            lambda: folder.mkdir(),
            lambda: write_run(folder, [start()]),
            lambda: append(folder / "events.jsonl", [event("step", 10, loss=0.25)]),
            lambda: append(folder / "events.jsonl", [event("end", 40, digest="x")]),
        ]
    )
    monkeypatch.setattr(terminal_screen.time, "sleep", lambda _: next(stages)())
    output = io.StringIO()
    assert terminal_screen.watch_on_terminal(RunFollower(folder, 60), Console(file=output, width=80)) == 0
    lines = output.getvalue().splitlines()
    assert lines[0] == f"waiting for {folder}"
    assert lines[1] == "not started yet"
    assert "loss 0.25" in lines[3]
    assert lines[-1].startswith("finished after step 40 of 40")
