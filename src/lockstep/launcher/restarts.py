"""Whether to start all ranks again after a failure."""

import re
from typing import NamedTuple

from lockstep.supervision.failure import Verdict

_OF_ONE_PROCESS = re.compile(r"0x[0-9a-f]+|\bpid\S* [\d, ]*\d")  # in a cause: what differs each time


class Decision(NamedTuple):
    goes_on: bool
    why: str  # to be said; empty: nothing needs to be


class Restarts:
    """`most` restarts without progress: a step that no attempt has made before fills the budget up again."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._left = most
        self._furthest = 0  # updates completed, by any attempt
        self._before: tuple[int, str] | None = None  # how far the attempt before had come, and what it failed of
        self.num_made = 0
        self.is_stuck = False  # the latest attempt came no further than those before it

    def decide(self, verdict: Verdict, step: int, *, can_change: bool = False) -> Decision:
        """After an attempt that had completed `step` updates when it failed; `can_change`: the next can be another."""
        self.is_stuck = step <= self._furthest and self.num_made > 0
        if step > self._furthest:
            self._furthest, self._left = step, self._most
        here = (step, _OF_ONE_PROCESS.sub("", verdict.cause))
        is_same, self._before = here == self._before, here
        if verdict.is_final or self._most == 0:
            return Decision(False, "")
        if is_same and not verdict.is_from_outside and not can_change:
            return Decision(
                False, f"no restart: it failed after step {step} in the same way as before, so it would again"
            )
        if self._left == 0:
            times = f"{self._most} restart{'s' * (self._most > 1)}"
            return Decision(False, f"no restart: {times} without a step that is new (--max-restarts)")
        self._left -= 1
        self.num_made += 1
        return Decision(True, f"restarting all ranks ({self._left} more, or {self._most} again after a new step)")
