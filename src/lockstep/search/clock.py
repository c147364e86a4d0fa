"""The time that a search may take goes by over all its attempts."""

import time


class Clock:
    """The time that a search has taken, over all attempts."""

    def __init__(self) -> None:
        self._before_s = 0.0
        self._started = time.monotonic()

    def start(self) -> None:
        self._started = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return self._before_s + time.monotonic() - self._started

    def state_dict(self) -> dict[str, float]:
        return {"elapsed_s": self.elapsed_s}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._before_s = state["elapsed_s"]
