"""Finds the largest batch that fits in memory by trying: doubling, then bisecting."""

import gc
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lockstep.checkpoint.available_memory import available_memory_bytes
from lockstep.errors import UserError
from lockstep.world.process_memory import is_out_of_memory, limit_memory, memory_share

_FINE_ENOUGH = 1 / 16  # of the largest size that fits: the distance to one that does not
_AS_FAST = 1.05  # times the best


class BatchAttempt(NamedTuple):
    """One batch size that was tried."""

    size: int
    fits: bool
    peak_bytes: int | None = None
    sample_s: float | None = None
    why: str = ""  # why it does not fit
    most: int | None = None  # the largest size that can be tried, if known


class BatchSizeSearch(NamedTuple):
    """The result of a search: every size tried, the largest that fits and the fastest."""

    attempts: list[BatchAttempt]
    ended: str  # what ended the search before it found the answer: "time", "tries" or "most"; otherwise empty

    @property
    def largest(self) -> int | None:
        """The largest size that fits; None if none does."""
        return max((attempt.size for attempt in self.attempts if attempt.fits), default=None)

    @property
    def too_large(self) -> int | None:
        """The smallest size that does not fit; None if all did."""
        return min((attempt.size for attempt in self.attempts if not attempt.fits), default=None)

    @property
    def fastest(self) -> BatchAttempt | None:
        """The smallest size that is within 5 % of the best time per sample."""
        timed = [(attempt.sample_s, attempt) for attempt in self.attempts if attempt.sample_s is not None]
        if not timed:
            return None
        best = min(seconds for seconds, _ in timed)
        return min((each for seconds, each in timed if seconds <= _AS_FAST * best), key=lambda each: each.size)


def search_sizes(
    attempt: Callable[[int, float], BatchAttempt | None],
    *,
    start: int,
    most: int | None,
    max_tries: int,
    limit_s: float,
) -> BatchSizeSearch:
    """Search with `attempt(size, left_s)`, which tries one size, or returns None if time ran out."""
    began = time.monotonic()
    attempts: list[BatchAttempt] = []
    size: int | None = start if most is None else min(start, most)
    while size is not None:
        left_s = limit_s - (time.monotonic() - began)
        if left_s <= 0:
            return BatchSizeSearch(attempts, "time")
        if len(attempts) >= max_tries:
            return BatchSizeSearch(attempts, "tries")
        answer = attempt(size, left_s)
        if answer is None:
            return BatchSizeSearch(attempts, "time")
        attempts.append(answer)
        most = answer.most if most is None else most
        size = _next_size(BatchSizeSearch(attempts, ""), most)
    found = BatchSizeSearch(attempts, "")
    return found._replace(ended="most") if found.too_large is None else found


def _next_size(found: BatchSizeSearch, most: int | None) -> int | None:
    """Return the next size to try; None if the answer is known."""
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
) -> BatchSizeSearch:
    """Find the largest batch that fits in memory: `largest_batch(try_step).largest`.

    Args:
        try_step: `try_step(size)` makes one whole training step, optimizer included, with this many samples. It is
            called twice for each size. A size at which it runs out of memory does not fit; on a CPU, one that would
            use nearly all of the machine's memory. Other errors are raised.
        start: the first size to try.
        most: the largest size to try.
        max_tries: how many sizes to try at most.
        limit_s: how many seconds to take at most.
    """
    if start < 1 or (most is not None and most < 1):
        raise UserError(f"largest_batch: start={start}, most={most}: expected whole numbers greater than 0")

    def attempt(size: int, _left_s: float) -> BatchAttempt:
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        room = None if on_gpu else memory_share(available_memory_bytes())
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        try:
            with limit_memory(room):
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
            return BatchAttempt(size, True, torch.cuda.max_memory_allocated() if on_gpu else None, seconds / size)
        finally:
            gc.collect()  # what a failed step has left behind
            if on_gpu:
                torch.cuda.empty_cache()
        return BatchAttempt(size, False, why=why)

    return search_sizes(attempt, start=start, most=most, max_tries=max_tries, limit_s=limit_s)
