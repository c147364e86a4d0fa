"""W&B's service process: started by `wandb.init`, and ended here within a bounded time, whatever state it is in."""

import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from lockstep.config import environment

_VARIABLE = "WANDB_SERVICE"  # W&B sets it where a service runs
_MARGIN_S = 5.0  # for the service to end in, beyond the time it has for sending


class WandbService:
    """Made before `wandb.init`: a service that runs already is somebody else's, and stays."""

    def __init__(self) -> None:
        self._is_ours = environment.variable(_VARIABLE) is None
        self._hooks = (sys.exit, sys.excepthook)
        # For its sockets, which it does not always clear away. A short path: the kernel's limit for them is low.
        self._folder = tempfile.mkdtemp(prefix="wb-") if self._is_ours else None

    @property
    def variables(self) -> dict[str, str]:
        """For the process, when it starts."""
        return {} if self._folder is None else {"TMPDIR": self._folder}

    def end(self, finish: Callable[[], None], *, exit_code: int, limit_s: float) -> None:
        """Finish the run and stop the process; raise what went wrong on the way, once nothing is left of either."""
        problems: list[Exception] = []
        process, connection_loop = self._internals()
        ending = _Attempt(lambda: self._finish_and_stop(finish, exit_code), problems)
        if not ending.is_done_within(limit_s + _MARGIN_S):
            problems.insert(0, TimeoutError(f"W&B did not finish within {limit_s:g} s"))
        if problems and process is not None:
            process.kill()
            process.wait()
            ending.is_done_within(_MARGIN_S)  # it waited for the process
            _Attempt(connection_loop.join, problems).is_done_within(_MARGIN_S)
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

    def _internals(self) -> tuple[Any, Any]:
        """The process, and the thread's loop that talks to it. W&B has no public names for them."""
        import wandb

        if not self._is_ours or environment.variable(_VARIABLE) is None:
            return None, None
        setup: Any = wandb.setup()
        return setup._connection._proc._process, setup._asyncer

    def _restore_hooks(self) -> None:
        """W&B leaves its own functions in their place."""
        if self._is_ours and getattr(sys.exit, "__module__", "").startswith("wandb"):
            sys.exit, sys.excepthook = self._hooks


class _Attempt:
    """A call in a thread of its own: W&B waits without limit for a service that does not answer, and calls `sys.exit`
    where one ended badly."""

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
