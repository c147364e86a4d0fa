"""The largest batch that fits, found by trying: doubled until one does not fit, then in between."""

import gc
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lockstep.checkpoint.memory_room import available_bytes
from lockstep.errors import UserError
from lockstep.world.memory import is_out_of_memory, limited_memory, memory_share

_FINE_ENOUGH = 1 / 16  # of a size: that near to one that does not fit
_AS_FAST = 1.05  # times the best


class Attempt(NamedTuple):
    size: int
    fits: bool
    peak_bytes: int | None = None
    sample_s: float | None = None
    why: str = ""  # it does not fit
    most: int | None = None  # that can be tried at all, where that is known


class Search(NamedTuple):
    attempts: list[Attempt]
    ended: str  # by what, if not because the answer was found: "time", "tries", "most"

    @property
    def largest(self) -> int | None:
        """That fits; None if nothing does."""
        return max((attempt.size for attempt in self.attempts if attempt.fits), default=None)

    @property
    def too_large(self) -> int | None:
        """The smallest that does not fit; None if everything did."""
        return min((attempt.size for attempt in self.attempts if not attempt.fits), default=None)

    @property
    def fastest(self) -> Attempt | None:
        """The smallest of those that take hardly longer for a sample than the best."""
        timed = [(attempt.sample_s, attempt) for attempt in self.attempts if attempt.sample_s is not None]
        if not timed:
            return None
        best = min(seconds for seconds, _ in timed)
        return min((each for seconds, each in timed if seconds <= _AS_FAST * best), key=lambda each: each.size)


def search_sizes(
    attempt: Callable[[int, float], Attempt | None], *, start: int, most: int | None, max_tries: int, limit_s: float
) -> Search:
    """`attempt(size, left_s)` tries one; None if the time was not enough to tell."""
    began = time.monotonic()
    attempts: list[Attempt] = []
    size: int | None = start if most is None else min(start, most)
    while size is not None:
        left_s = limit_s - (time.monotonic() - began)
        if left_s <= 0:
            return Search(attempts, "time")
        if len(attempts) >= max_tries:
            return Search(attempts, "tries")
        answer = attempt(size, left_s)
        if answer is None:
            return Search(attempts, "time")
        attempts.append(answer)
        most = answer.most if most is None else most
        size = _next_size(Search(attempts, ""), most)
    found = Search(attempts, "")
    return found._replace(ended="most") if found.too_large is None else found


def _next_size(found: Search, most: int | None) -> int | None:
    """None: there is nothing more to find out."""
    fits, too_large = found.largest or 0, found.too_large
    if too_large is None:
        return 2 * fits if most is None else min(2 * fits, most) if fits < most else None
    if fits == 0:
        return too_large // 2 or None
    is_near = too_large - fits <= max(1, int(_FINE_ENOUGH * fits))
    return None if is_near else (fits + too_large) // 2


def largest_batch(
    try_step: Callable[[int], Any],
    *,
    start: int = 1,
    most: int | None = None,
    max_tries: int = 24,
    limit_s: float = 300.0,
) -> Search:
    """The largest batch that fits, for a loop of one's own: `largest_batch(try_step).largest`.

    `try_step(size)` makes one whole step with so many samples, with the optimizer's: it is called twice for each size.
    What runs out of memory does not fit; on a CPU, that is what would not leave a part of the machine's memory free.
    Any other error is the caller's. `most`: no more than that are tried.
    """
    if start < 1 or (most is not None and most < 1):
        raise UserError(f"largest_batch: start={start}, most={most}: expected whole numbers greater than 0")

    def attempt(size: int, _left_s: float) -> Attempt:
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        room = None if on_gpu else memory_share(available_bytes())
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        try:
            with limited_memory(room):
                try_step(size)
                began = time.perf_counter()
                try_step(size)
                if on_gpu:
                    torch.cuda.synchronize()
                seconds = time.perf_counter() - began
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            why = "out of memory"
        else:
            return Attempt(size, True, torch.cuda.max_memory_allocated() if on_gpu else None, seconds / size)
        finally:
            gc.collect()  # what a failed step has left behind
            if on_gpu:
                torch.cuda.empty_cache()
        return Attempt(size, False, why=why)

    return search_sizes(attempt, start=start, most=most, max_tries=max_tries, limit_s=limit_s)
