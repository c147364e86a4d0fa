"""What TensorBoard's own reader finds in the files that a run writes."""

import math
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lockstep.config.job_schema import LogConfig
from lockstep.events.event_log import EventLog
from lockstep.events.media import write_image
from lockstep.loggers.logger_factory import open_loggers


def events_in(folder: Path, attempt: int = 1) -> EventLog:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text("seed: 7\n")
    return EventLog(open_loggers(LogConfig(tensorboard=True), folder), attempt)


def read(folder: Path) -> Any:
    accumulator = EventAccumulator(str(folder / "tensorboard"), {"scalars": 0, "images": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def curve(reader: Any, name: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in reader.Scalars(name)]


def text(reader: Any, name: str) -> list[tuple[int, str]]:
    return [(entry.step, entry.tensor_proto.string_val[0].decode()) for entry in reader.Tensors(f"{name}/text_summary")]


def test_scalars_images_and_text_at_their_steps(tmp_path: Path) -> None:
    events = events_in(tmp_path)
    events.emit("start", 0, processes=2)
    events.emit("step", 1, loss=0.5)
    events.emit("step", 2, loss=float("nan"), deep={"a": float("inf")}, parts=[1, 2])
    events.emit("eval", 2, epoch=1, metrics={"accuracy": 0.75})
    path = write_image(tmp_path, "samples", 2, np.arange(6, dtype=np.uint8).reshape(2, 3))
    events.emit("step", 2, images={"samples": path})
    events.emit("step", 2, texts={"sample": "héllo"})
    events.emit("checkpoint", 2, path="checkpoints/step-2")
    events.emit("end", 2, digest="3f")
    events.close()
    reader = read(tmp_path)
    first, second = curve(reader, "train/loss")
    assert first == (1, 0.5)
    assert second[0] == 2 and math.isnan(second[1])
    assert curve(reader, "train/deep/a") == [(2, math.inf)]
    assert curve(reader, "eval/accuracy") == [(2, 0.75)]
    (image,) = reader.Images("images/samples")
    assert (image.step, image.encoded_image_string) == (2, (tmp_path / path).read_bytes())
    assert text(reader, "texts/sample") == [(2, "héllo")]
    assert text(reader, "run/config") == [(0, "    seed: 7\n")]
    assert text(reader, "run/start") == [(0, "processes: 2")]
    assert text(reader, "run/checkpoint") == [(2, "path: checkpoints/step-2")]
    assert text(reader, "run/end") == [(2, "digest: 3f")]


def test_a_point_has_the_time_of_its_event(tmp_path: Path) -> None:
    (sink,) = open_loggers(LogConfig(tensorboard=True), tmp_path)
    (tmp_path / "config.yaml").write_text("")
    sink.emit({"t": 1000.5, "attempt": 1, "step": 0, "kind": "start"})
    sink.emit({"t": 1001.5, "attempt": 1, "step": 1, "kind": "step", "loss": 1.0})
    sink.close()
    (point,) = read(tmp_path).Scalars("train/loss")
    assert point.wall_time == 1001.5


class Clock:
    """TensorBoard's clock. It names its files by the second, and reads them in order of their names."""

    def __init__(self) -> None:
        self.ahead_s = 0

    def time(self) -> float:
        return time.time() + self.ahead_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time", clock)
    return clock


@pytest.mark.parametrize(
    ("start", "kept"), [(0, []), (2, [(0, 0.0), (1, 1.0), (2, 2.0)])], ids=["from the start", "resumed"]
)
def test_repeated_steps_show_once(tmp_path: Path, clock: Clock, start: int, kept: list[tuple[int, float]]) -> None:
    events = events_in(tmp_path)
    events.emit("start", 0)
    for step in range(5):
        events.emit("step", step, loss=step)
    events.close()
    clock.ahead_s += 1
    again = events_in(tmp_path, attempt=2)
    again.emit("start", start)
    for step in range(len(kept), 4):
        again.emit("step", step, loss=10 * step)
    again.close()
    assert curve(read(tmp_path), "train/loss") == kept + [(step, 10.0 * step) for step in range(len(kept), 4)]


def test_a_second_start_of_one_attempt_hides_nothing(tmp_path: Path) -> None:
    events = events_in(tmp_path)
    for start in (0, 2):
        events.emit("start", start)
        events.emit("step", start + 1, loss=1.0)
        events.emit("step", start + 2, loss=1.0)
    events.close()
    assert [step for step, _ in curve(read(tmp_path), "train/loss")] == [1, 2, 3, 4]


def test_it_can_be_closed_and_opened_again(tmp_path: Path, clock: Clock) -> None:
    sinks = open_loggers(LogConfig(tensorboard=True), tmp_path)
    (tmp_path / "config.yaml").write_text("")
    for attempt, start in ((1, 0), (2, 1)):
        events = EventLog(sinks, attempt)
        events.emit("start", start)
        events.emit("step", start + 1, loss=1.0)
        events.close()
        events.close()
        clock.ahead_s += 1
    assert curve(read(tmp_path), "train/loss") == [(1, 1.0), (2, 1.0)]


def test_a_missing_image_switches_it_off_and_leaves_no_thread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    threads = set(threading.enumerate())
    events = events_in(tmp_path)
    events.emit("start", 0)
    events.emit("step", 1, loss=1.0)
    events.emit("step", 2, images={"a": "media/absent.png"})
    assert set(threading.enumerate()) == threads
    events.emit("step", 3, loss=1.0)
    events.close()
    assert [message.split(":")[0] for message in caplog.messages] == [
        "log.tensorboard is switched off at step 2, training continues"
    ]
    assert curve(read(tmp_path), "train/loss") == [(1, 1.0)]
