"""What an event has to show."""

import math
from pathlib import Path

from lockstep.events.event import Events
from lockstep.observe.loggers.shown import Shown, shown
from tests.sinks import Kept

HERE = Path("runs/a")


def of(kind: str, **fields: object) -> Shown:
    kept = Kept()
    Events([kept]).emit(kind, 7, **fields)  # type: ignore[arg-type]
    return shown(kept.events[0], HERE)


def test_numbers_of_a_step_are_curves_of_training() -> None:
    assert of("step", loss=0.5, epoch=2, note="hello", nothing=None).scalars == {"train/loss": 0.5, "train/epoch": 2.0}
    assert of("step", loss=0.5).step == 7
    assert of("step", loss=0.5).texts == {}


def test_metrics_of_an_evaluation_are_curves_of_their_own() -> None:
    assert of("eval", epoch=1, metrics={"accuracy": 0.9, "loss": 2}).scalars == {
        "eval/epoch": 1.0,
        "eval/accuracy": 0.9,
        "eval/loss": 2.0,
    }


def test_non_finite_numbers_are_numbers_again() -> None:
    scalars = of("step", a=float("nan"), b=float("inf"), c=-float("inf")).scalars
    assert math.isnan(scalars["train/a"])
    assert (scalars["train/b"], scalars["train/c"]) == (math.inf, -math.inf)


def test_nested_numbers_have_paths_and_lists_make_no_curve() -> None:
    scalars = of("step", grad={"norm": {"a": 1.0}, "all": [1.0, 2.0]}, losses=[0.5], ok=True).scalars
    assert scalars == {"train/grad/norm/a": 1.0, "train/ok": 1.0}


def test_images_are_files_and_texts_text() -> None:
    event = of("step", images={"samples": "media/samples-7.png"}, texts={"sample": "hello"})
    assert event.images == {"images/samples": HERE / "media/samples-7.png"}
    assert event.texts == {"texts/sample": "hello"}
    assert event.scalars == {}


def test_other_kinds_are_told_in_words() -> None:
    for kind in ("start", "checkpoint", "restart", "incident", "end"):
        event = of(kind, path="checkpoints/step-7", metrics={"accuracy": 0.5})
        assert event.texts == {f"run/{kind}": "path: checkpoints/step-7\nmetrics/accuracy: 0.5"}
        assert event.scalars == {}
