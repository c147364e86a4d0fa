"""What W&B writes offline, what is kept from it, and that it ends in time with nothing left running."""

import math
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from lockstep.config.field_types import Private
from lockstep.config.job_schema import LogConfig, WandbConfig
from lockstep.config.resolved_config import ResolvedSettings
from lockstep.config.train_schema import BatchConfig, Config
from lockstep.errors import UserError
from lockstep.events.event_log import EventLog
from lockstep.events.media import write_image
from lockstep.events.run_folder import RunFolder
from lockstep.loggers import wandb_backend
from lockstep.loggers.logger_factory import open_loggers
from lockstep.loggers.logger_sink import LoggedValues
from lockstep.loggers.wandb_backend import WandbBackend
from tests.wandb_files import config, exit_code, history, offline_runs, run_record


class SecretConfig(Config):
    token: Private = Private("${A_TOKEN}")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty home folder, which must stay empty; and no W&B settings from outside."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "XDG_"))]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("A_TOKEN", "hunter2")
    yield home
    assert list(home.iterdir()) == []


def events_in(folder: Path, attempt: int = 1, **options: object) -> EventLog:
    """Events of a run that has claimed its folder, logged to W&B alone."""
    settings = ResolvedSettings(SecretConfig(recipe="r", epochs=1, batch=BatchConfig(global_batch=8)))
    RunFolder(folder).claim(settings, {}).release()
    chosen = WandbConfig.model_validate({"mode": "offline", "project": "p"} | options)
    return EventLog(open_loggers(LogConfig(wandb=chosen), folder), attempt)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "lockstep"]


def services() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if "wandb" in child.name()]


def leftover_sockets(processes: list[psutil.Process]) -> list[Path]:
    """Files in the temporary folder that are named after the processes."""
    temporary = Path(tempfile.gettempdir())
    names = [f"wandb*-{process.pid}-*" for process in processes]
    return [path for name in names for place in (name, f"*/{name}") for path in temporary.glob(place)]


def test_scalars_images_text_and_config_offline(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    events = events_in(folder, name="named", tags=["a", "b"])
    hooks = (sys.exit, sys.excepthook)
    events.emit("start", 0, processes=2)
    processes = services()
    assert processes
    assert leftover_sockets(processes)
    events.emit("step", 1, loss=0.5)
    events.emit("step", 2, loss=float("nan"), deep={"a": float("-inf")}, parts=[1])
    events.emit("eval", 2, epoch=1, metrics={"accuracy": 0.75})
    path = write_image(folder, "../samples", 2, np.zeros((2, 3), np.uint8))
    events.emit("step", 2, images={"../samples": path})
    events.emit("step", 2, texts={"sample": "<b>"})
    events.emit("end", 2, digest="3f")
    events.close()
    assert not services()
    assert not leftover_sockets(processes)
    assert (sys.exit, sys.excepthook) == hooks
    (file,) = offline_runs(folder)
    steps = history(file)
    assert steps[1] == {"train/loss": 0.5}
    assert steps[2]["eval/accuracy"] == 0.75
    assert math.isnan(steps[2]["train/loss"])
    assert steps[2]["train/deep/a"] == float("-inf")
    files = file.parent / "files"
    assert (files / steps[2]["images/../samples.path"]).read_bytes() == (folder / path).read_bytes()
    assert "<pre>&lt;b&gt;</pre>" in (files / steps[2]["texts/sample.path"]).read_text()
    assert "digest: 3f" in (files / steps[2]["run/end.path"]).read_text()
    run = run_record(file)
    assert (run.project, run.display_name, list(run.tags)) == ("p", "named", ["a", "b"])
    assert config(file)["batch"] == {"global": 8, "per_device": None}
    assert config(file)["start"] == {"processes": 2}
    assert exit_code(file) == 0
    assert {entry.name for entry in folder.iterdir()} == {".lock", "config.yaml", "run.json", "media", "wandb"}


def test_no_secret_and_no_command_line_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train", "password=swordfish"])
    events = events_in(tmp_path / "a")
    events.emit("start", 0)
    time.sleep(1.0)  # W&B collects what it knows of the machine and the command in the background
    events.emit("end", 0)
    events.close()
    (file,) = offline_runs(tmp_path / "a")
    assert config(file)["token"] == "${A_TOKEN}"
    written = b"".join(path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert b"A_TOKEN" in written
    assert b"hunter2" not in written
    assert b"swordfish" not in written


def test_a_second_attempt_resumes_the_run_and_a_crash_fails_it(tmp_path: Path) -> None:
    for attempt in (1, 2):
        events = events_in(tmp_path / "mine", attempt)
        events.emit("start", 0)
        events.emit("step", 1, loss=0.5)
        if attempt == 2:
            events.emit("end", 1)
        events.close()
    first, second = offline_runs(tmp_path / "mine")
    assert run_record(first).run_id == run_record(second).run_id
    assert run_record(first).display_name == "mine"
    assert run_record(second).resume  # resuming is allowed
    assert (exit_code(first), exit_code(second)) == (1, 0)


def test_steps_that_wandb_has_seen_are_not_logged_again(tmp_path: Path) -> None:
    events_in(tmp_path / "a")
    backend = WandbBackend(WandbConfig(mode="offline"), tmp_path / "a")
    backend.open({"t": 0.0, "attempt": 2, "step": 0, "kind": "start"}, "seed: 1\n")
    backend._first_step = 2  # as the server says of a run that it has up to step 1
    for step in (1, 2):
        backend.show(LoggedValues(step, 0.0, {"train/loss": 1.0}, {}, {}))
    backend.close(failed=False)
    assert list(history(offline_runs(tmp_path / "a")[0])) == [2]


@pytest.fixture
def silent_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accepts connections on loopback and never answers; W&B is configured to use it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        yield


@pytest.mark.usefixtures("silent_server")
def test_training_continues_if_wandb_does_not_start_in_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    events = events_in(tmp_path / "a", mode="online", init_timeout_s=1.0)
    started = time.monotonic()
    events.emit("start", 0)
    assert time.monotonic() - started < 20  # far below the 90 s that W&B waits by default
    assert not services()
    events.emit("step", 1, loss=0.5)
    events.close()
    assert len(warnings_in(caplog)) == 1
    assert warnings_in(caplog)[0].startswith("log.wandb is switched off at step 0, training continues: CommError: ")


@pytest.mark.usefixtures("silent_server")
def test_training_stops_if_wandb_is_required_and_does_not_start(tmp_path: Path) -> None:
    events = events_in(tmp_path / "a", mode="online", init_timeout_s=1.0, required=True)
    with pytest.raises(UserError, match=r"log\.wandb did not start, and log\.wandb\.required is true"):
        events.emit("start", 0)
    events.close()
    assert not services()


def test_training_continues_without_an_api_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    events = events_in(tmp_path / "a", mode="online")
    events.emit("start", 0)
    events.close()
    assert len(warnings_in(caplog)) == 1
    assert "No API key" in warnings_in(caplog)[0]


def test_a_frozen_service_is_killed_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wandb_backend, "_MARGIN_S", 1.0)
    threads = set(threading.enumerate())
    events = events_in(tmp_path / "a", finish_timeout_s=0.5)
    events.emit("start", 0)
    processes = services()  # W&B's service, and its child that monitors the machine
    (service,) = [child for child in psutil.Process().children() if child.name() == "wandb-core"]
    service.send_signal(signal.SIGSTOP)
    events.emit("end", 1)
    events.close()
    assert warnings_in(caplog) == ["log.wandb did not close cleanly: TimeoutError: W&B did not finish within 0.5 s"]
    assert not service.is_running()
    _, alive = psutil.wait_procs(processes, timeout=10)  # the child exits when it sees that its parent has
    for process in alive:
        process.kill()
    assert not alive
    assert not leftover_sockets(processes)
    assert set(threading.enumerate()) == threads


def test_a_killed_service_switches_it_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    events = events_in(tmp_path / "a")
    events.emit("start", 0)
    for process in services():
        process.kill()
        process.wait(timeout=10)
    for step in range(1, 4):
        events.emit("step", step, loss=0.5)
    events.close()
    assert len(warnings_in(caplog)) == 1


def test_wandb_mode_disabled_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    events = events_in(tmp_path / "a", mode=None)
    events.emit("start", 0)
    events.emit("step", 1, loss=0.5)
    events.close()
    assert not offline_runs(tmp_path / "a")


def test_a_wandb_run_of_the_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "theirs"))
    import wandb

    hooks = (sys.exit, sys.excepthook)
    theirs = wandb.init(dir=tmp_path, mode="offline", settings=wandb.Settings(silent=True, console="off"))
    try:
        events = events_in(tmp_path / "a")
        events.emit("start", 0)
        events.emit("step", 1, loss=0.5)
        events.emit("end", 1)
        events.close()
        theirs.log({"mine": 1.0})
        theirs.finish()
    finally:
        wandb.teardown()
        sys.exit, sys.excepthook = hooks
    assert history(offline_runs(tmp_path / "a")[0])[1]["train/loss"] == 0.5
    assert history(offline_runs(tmp_path)[0]) == {0: {"mine": 1.0}}
