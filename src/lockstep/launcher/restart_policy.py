"""Whether to restart all ranks after a failure: a budget of restarts that progress refills."""

import re
from typing import NamedTuple

from lockstep.config.plurals import count_noun
from lockstep.supervision.failure_report import FailureVerdict

_VARIES = re.compile(r"0x[0-9a-f]+|\bpid\S* [\d, ]*\d")  # the parts of a cause that differ between equal crashes


class RestartDecision(NamedTuple):
    """What to do after a failure, and why."""

    is_restart: bool
    why: str  # to be printed; may be empty


class RestartPolicy:
    """Allows `max_restarts` restarts without progress: a step that no attempt reached before refills the budget."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._num_left = max_restarts
        self._furthest_step = 0  # of all attempts
        self._last_failure: tuple[int, str] | None = None  # the step and the cause of the previous attempt
        self.num_made = 0
        self.is_stuck = False  # the last attempt got no further than those before it

    def decide(self, verdict: FailureVerdict, step: int, *, can_change: bool = False) -> RestartDecision:
        """Decide what to do after a failed attempt.

        Args:
            verdict: why it failed.
            step: how many updates it had completed.
            can_change: the next attempt can have fewer processes, so the same crash need not occur again.
        """
        self.is_stuck = step <= self._furthest_step and self.num_made > 0
        if step > self._furthest_step:
            self._furthest_step, self._num_left = step, self._max_restarts
        failure = (step, _VARIES.sub("", verdict.cause))
        is_same, self._last_failure = failure == self._last_failure, failure
        if verdict.is_final or self._max_restarts == 0:
            return RestartDecision(False, "")
        if is_same and not verdict.is_from_outside and not can_change:
            return RestartDecision(
                False, f"no restart: it failed after step {step} in the same way as before, so it would again"
            )
        if self._num_left == 0:
            restarts = count_noun(self._max_restarts, "restart")
            return RestartDecision(False, f"no restart: {restarts} without a new step (--max-restarts)")
        self._num_left -= 1
        self.num_made += 1
        left = f"{self._num_left} more, or {self._max_restarts} again after a new step"
        return RestartDecision(True, f"restarting all ranks ({left})")
