"""Finding the largest size that fits: in few tries, within the time limit, and without hiding other errors."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lockstep
from lockstep.errors import UserError
from lockstep.train.batch_search import BatchAttempt, BatchSizeSearch, search_sizes
from tests.commands import run


def fits_up_to(limit: int, most: int | None = None) -> Callable[[int, float], BatchAttempt]:
    return lambda size, _: BatchAttempt(size, size <= limit, 1, 1.0, most=most)


def sizes(found: BatchSizeSearch) -> list[int]:
    return [attempt.size for attempt in found.attempts]


def search(
    limit: int, start: int = 1, most: int | None = None, max_tries: int = 100, limit_s: float = 1e9
) -> BatchSizeSearch:
    return search_sizes(fits_up_to(limit, most), start=start, most=None, max_tries=max_tries, limit_s=limit_s)


def test_it_doubles_then_bisects() -> None:
    found = search(10, start=2)
    assert sizes(found) == [2, 4, 8, 16, 12, 10, 11]
    assert (found.largest, found.too_large, found.ended) == (10, 11, "")


def test_it_halves_where_the_first_does_not_fit() -> None:
    found = search(5, start=32)
    assert sizes(found) == [32, 16, 8, 4, 6, 5]
    assert found.largest == 5
    nothing = search(0, start=4)
    assert sizes(nothing) == [4, 2, 1]
    assert nothing.largest is None


@given(limit=st.integers(1, 10**6), start=st.integers(1, 10**6))
def test_it_comes_close_in_few_tries(limit: int, start: int) -> None:
    found = search(limit, start)
    assert found.largest is not None
    assert found.too_large is not None
    assert found.largest <= limit < found.too_large
    assert found.too_large - found.largest <= max(1, found.largest // 16)
    assert len(found.attempts) <= 1 + 20 + 6
    assert len(set(sizes(found))) == len(sizes(found))


def test_it_ends_at_the_whole_data_set_after_n_tries_or_in_time() -> None:
    assert sizes(search(10**9, most=100)) == [1, 2, 4, 8, 16, 32, 64, 100]
    assert search(10**9, most=100).ended == "most"
    assert search(10**9, max_tries=3).ended == "tries"
    assert sizes(search(10**9, max_tries=3)) == [1, 2, 4]
    assert search(10**9, limit_s=0) == BatchSizeSearch([], "time")
    in_time = search_sizes(
        lambda size, _: None if size > 4 else BatchAttempt(size, True), start=1, most=None, max_tries=9, limit_s=1e9
    )
    assert (sizes(in_time), in_time.ended, in_time.largest) == ([1, 2, 4], "time", 4)


def test_the_fastest_is_the_smallest_that_is_as_good_as_the_best() -> None:
    rates = {1: 9.0, 2: 1.04, 4: 1.0, 8: 1.2}
    found = BatchSizeSearch(
        [BatchAttempt(size, True, 1, rate) for size, rate in rates.items()] + [BatchAttempt(16, False)], ""
    )
    assert found.fastest is not None
    assert found.fastest.size == 2
    assert BatchSizeSearch([BatchAttempt(1, False)], "").fastest is None


WITHIN_500_MB = """
import json, resource
import torch, lockstep
from lockstep.train import batch_search

batch_search.available_memory_bytes = lambda: 500_000_000
before = resource.getrlimit(resource.RLIMIT_DATA)
calls = []

def try_step(size):
    calls.append(size)
    torch.empty(size * 10_000_000)

found = lockstep.largest_batch(try_step)
is_put_back = resource.getrlimit(resource.RLIMIT_DATA) == before
torch.empty(200_000_000)
print(json.dumps([found.largest, [(each.size, each.fits, each.why) for each in found.attempts], calls, is_put_back]))
"""


def test_a_custom_loop_is_tried_within_a_part_of_the_memory(tmp_path: Path) -> None:
    """With the real allocator, in a new process: each sample takes 40 MB, and 425 of 500 MB may be used."""
    finished = run([sys.executable, "-c", WITHIN_500_MB], tmp_path)
    assert finished.code == 0, finished.err
    largest, attempts, calls, is_put_back = json.loads(finished.out)
    assert largest in (9, 10)
    assert attempts[:4] == [[size, True, ""] for size in (1, 2, 4, 8)]
    assert attempts[4] == [16, False, "out of memory"]
    assert calls[:4] == [1, 1, 2, 2]
    assert is_put_back


def test_any_other_error_is_raised() -> None:
    def try_step(size: int) -> None:
        raise RuntimeError("a shape is wrong")

    with pytest.raises(RuntimeError, match="a shape is wrong"):
        lockstep.largest_batch(try_step)
    with pytest.raises(UserError, match="start=0"):
        lockstep.largest_batch(try_step, start=0)
