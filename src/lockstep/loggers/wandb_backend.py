"""Log to Weights & Biases: one W&B run for all attempts in a run folder.

The W&B run has the id of the run folder, and its files, logs and caches stay in RUN/wandb. `wandb.init` starts a
service process, `wandb-core`; at the end it is stopped within a bounded time, whatever its state.
"""

import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config import environment
from lockstep.config.job_schema import WandbConfig
from lockstep.errors import UserError
from lockstep.events.event_log import Event
from lockstep.events.run_folder import RunFolder
from lockstep.loggers.logger_sink import LoggedValues, event_fields
from lockstep.supervision.agent_folder import RankFiles

_SERVICE_VARIABLE = "WANDB_SERVICE"  # W&B sets it while a service runs
_MARGIN_S = 5.0  # for the service to exit, in addition to the time it has for uploading


class WandbBackend:
    """Writes a run's values to W&B, online or offline."""

    def __init__(self, config: WandbConfig, folder: Path) -> None:
        self._config = config
        self._folder = RunFolder(folder.resolve())
        self._run: Any = None
        self._first_step = 0
        self._service: WandbService | None = None

    def open(self, start: Event, config: str) -> None:
        """Start W&B's run, or resume the one that an earlier attempt started."""
        self._service = WandbService()
        try:
            with environment.temporary_variables(self._variables() | self._service.variables):
                self._run = self._init(config, start)
        except Exception as error:
            if self._config.required:
                reason = " ".join(str(error).split())
                raise UserError(f"log.wandb did not start, and log.wandb.required is true: {reason}") from error
            raise
        # After a restart W&B accepts only steps that it has not seen. In lockstep mode the repeated ones are equal.
        self._first_step = self._run.starting_step

    def show(self, values: LoggedValues) -> None:
        """Log the values of one event at its step."""
        import wandb

        if values.step < self._first_step:
            return
        entries: dict[str, Any] = {**values.scalars}
        entries |= {name: wandb.Image(str(path)) for name, path in values.images.items()}
        entries |= {name: wandb.Html(f"<pre>{escape(text)}</pre>") for name, text in values.texts.items()}
        self._run.log(entries, step=values.step)

    def close(self, *, failed: bool) -> None:
        """Finish W&B's run and stop the service process."""
        run, self._run = self._run, None
        if self._service is not None:
            self._service.end(
                lambda: None if run is None else run.finish(exit_code=int(failed)),
                exit_code=int(failed),
                limit_s=self._config.finish_timeout_s,
            )

    def _init(self, config: str, start: Event) -> Any:
        import wandb
        import yaml

        settings = wandb.Settings(
            init_timeout=self._config.init_timeout_s,
            login_timeout=self._config.init_timeout_s,  # for a question on a terminal
            finish_timeout=self._config.finish_timeout_s,
            silent=True,
            console="off",
            # Neither code nor the command line, which may contain a secret.
            save_code=False,
            disable_git=True,
            x_disable_meta=True,
            x_save_requirements=False,
            symlink=False,
        )
        return wandb.init(
            id=self._folder.read_run_json()["run_id"],
            resume="allow",
            reinit="create_new",  # the user's code may have its own W&B runs
            dir=self._folder.path,
            name=self._config.name or self._folder.path.name,
            project=self._config.project,
            entity=self._config.entity,
            tags=self._config.tags or None,
            mode=self._config.mode,
            config={**yaml.safe_load(config), "start": event_fields(start)},
            allow_val_change=True,  # another attempt may have a different number of processes
            settings=settings,
        )

    def _variables(self) -> dict[str, str]:
        """Return variables for what W&B has no setting for. Error reports are sent even from an offline run."""
        wanted = {
            "WANDB_CACHE_DIR": str(self._folder.path / "wandb" / "cache"),
            "WANDB_DATA_DIR": str(self._folder.path / "wandb" / "data"),
            "WANDB_ERROR_REPORTING": "false",
        }
        return {name: value for name, value in wanted.items() if environment.variable(name) is None}


class WandbInternals(NamedTuple):
    """What stopping a frozen service needs and `wandb` has no public name for. Last checked with wandb 0.31.0."""

    process: subprocess.Popen[bytes]  # wandb-core
    join_connection: Callable[[], None]  # waits for the thread that talks to it


def find_wandb_internals() -> WandbInternals | None:
    """Return W&B's service process and its connection; None if this version of wandb keeps them elsewhere."""
    import wandb

    try:
        setup: Any = wandb.setup()
        process, join_connection = setup._connection._proc._process, setup.asyncer.join
    except Exception:  # the caller finishes the run in any case
        return None
    return WandbInternals(process, join_connection) if isinstance(process, subprocess.Popen) else None


class WandbService:
    """Stops the service process that `wandb.init` starts. Create it first: a service that already runs is not ours."""

    def __init__(self) -> None:
        self._is_ours = environment.variable(_SERVICE_VARIABLE) is None
        self._hooks = (sys.exit, sys.excepthook)
        # For the service's sockets, which it does not always remove. The kernel limits the length of their path.
        files = RankFiles.own()
        room = files.sockets if files is not None and files.sockets.is_dir() else None
        self._folder = tempfile.mkdtemp(prefix="wb-", dir=room) if self._is_ours else None

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables to start it with."""
        return {} if self._folder is None else {"TMPDIR": self._folder}

    def end(self, finish: Callable[[], None], *, exit_code: int, limit_s: float) -> None:
        """Finish the run, stop the process and clean up; then raise the first error, if there was one.

        Args:
            finish: finishes the W&B run.
            exit_code: the run's, for W&B.
            limit_s: how long finishing may take before the process is killed.
        """
        problems: list[Exception] = []
        internals = self._internals()
        ending = _CallInThread(lambda: self._finish_and_stop(finish, exit_code), problems)
        if not ending.is_done_within(limit_s + _MARGIN_S):
            problems.insert(0, TimeoutError(f"W&B did not finish within {limit_s:g} s{self._stop_hint(internals)}"))
        if problems and internals is not None:
            internals.process.kill()
            internals.process.wait()
            ending.is_done_within(_MARGIN_S)  # it was waiting for the process
            _CallInThread(internals.join_connection, problems).is_done_within(_MARGIN_S)
        self._restore_hooks()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if problems:
            raise problems[0]

    def _finish_and_stop(self, finish: Callable[[], None], exit_code: int) -> None:
        import wandb

        try:
            finish()
        finally:
            if self._is_ours:
                wandb.teardown(exit_code)

    def _internals(self) -> WandbInternals | None:
        return find_wandb_internals() if self._is_running() else None

    def _is_running(self) -> bool:
        return self._is_ours and environment.variable(_SERVICE_VARIABLE) is not None

    def _stop_hint(self, internals: WandbInternals | None) -> str:
        import wandb

        if internals is not None or not self._is_running():
            return ""
        return f"; lockstep cannot stop the service of wandb {wandb.__version__}: end the process wandb-core yourself"

    def _restore_hooks(self) -> None:
        """Undo W&B's replacement of `sys.exit` and `sys.excepthook`."""
        if self._is_ours and getattr(sys.exit, "__module__", "").startswith("wandb"):
            sys.exit, sys.excepthook = self._hooks


class _CallInThread:
    """Runs a call in its own thread: W&B waits forever for a service that does not answer, and calls `sys.exit` if the
    service failed."""

    def __init__(self, call: Callable[[], None], problems: list[Exception]) -> None:
        self._call = call
        self._problems = problems
        self._thread = threading.Thread(target=self._run, name="lockstep-wandb-end", daemon=True)
        self._thread.start()

    def is_done_within(self, limit_s: float) -> bool:
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._call()
        except Exception as error:
            self._problems.append(error)
