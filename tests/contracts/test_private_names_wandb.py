"""The private names of wandb that lockstep uses, each behind one adapter. Last seen in wandb 0.31.0.

If a test here fails after an update of wandb, only `find_wandb_internals` needs to change. Until then runs still end
and clean up, but a service that is frozen can no longer be killed.
"""

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.loggers import wandb_backend
from lockstep.loggers.wandb_backend import WandbService, find_wandb_internals


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No W&B settings from outside, no reports to W&B; the hooks that W&B replaces are restored."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_MODE", "offline")
    hooks = (sys.exit, sys.excepthook)
    yield
    sys.exit, sys.excepthook = hooks


def test_the_service_process_and_its_connection_are_found(tmp_path: Path) -> None:
    import wandb

    service = WandbService()
    run = wandb.init(dir=tmp_path, settings=wandb.Settings(silent=True, console="off"))
    internals = find_wandb_internals()
    service.end(run.finish, exit_code=0, limit_s=30)
    assert internals is not None, f"wandb {wandb.__version__} has other private names"
    assert internals.process.poll() is not None
    assert callable(internals.join_connection)


@pytest.mark.parametrize(
    "setup",
    [
        SimpleNamespace(),
        SimpleNamespace(_connection=None, asyncer=None),
        SimpleNamespace(
            _connection=SimpleNamespace(_proc=SimpleNamespace(_process="no process")), asyncer=SimpleNamespace(join=1)
        ),
    ],
    ids=["renamed", "absent", "another type"],
)
def test_missing_names_are_no_error(setup: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wandb.setup", lambda: setup)
    assert find_wandb_internals() is None


@pytest.mark.parametrize("is_frozen", [False, True])
def test_without_the_private_names_a_run_still_finishes_and_cleans_up(
    is_frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wandb.setup", lambda: SimpleNamespace())
    monkeypatch.setattr("wandb.teardown", lambda exit_code: called.append(f"teardown {exit_code}"))
    monkeypatch.setattr(wandb_backend, "_MARGIN_S", 0.05)
    called: list[str] = []
    released = threading.Event()

    def finish() -> None:
        called.append("finish")
        assert released.wait(60)

    service = WandbService()
    folder = Path(service.variables["TMPDIR"])
    monkeypatch.setenv("WANDB_SERVICE", "a service of ours")
    if is_frozen:
        with pytest.raises(TimeoutError, match=r"within 0 s; lockstep cannot stop the service of wandb \d"):
            service.end(finish, exit_code=1, limit_s=0.0)
    else:
        released.set()
        service.end(finish, exit_code=1, limit_s=10.0)
    assert not folder.exists()
    released.set()
    for thread in threading.enumerate():
        if thread.name == "lockstep-wandb-end":
            thread.join(60)
    assert called == ["finish", "teardown 1"]
