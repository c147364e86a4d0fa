"""The verdict on a table of contenders, in words."""

from lockstep.bench.contenders import AGAIN, HAND_WRITTEN, Contender
from lockstep.bench.interleaved_timing import Ratio
from lockstep.bench.step_comparison import BenchRow, StepTime, WeightComparison, judge_rows

SAME = WeightComparison(0.0, ("a", "a"))
CORES = (4, "cores")


def time(median: float, noise: float = 0.0) -> StepTime:
    return StepTime(0.001, Ratio(median, median - 0.1, median + 0.2, median - noise, median + noise), [])


def by_hand(noise: float = 0.01) -> list[BenchRow]:
    apart = WeightComparison(0.0123, ("b", "c"))
    return [
        BenchRow(Contender(HAND_WRITTEN, "hand-written", HAND_WRITTEN), {1: time(1.0), 2: time(1.0)}, apart),
        BenchRow(Contender(AGAIN, "the same again", HAND_WRITTEN), {1: time(1.0, noise), 2: time(1.0, noise)}, apart),
    ]


def lockstep(lanes: int, one: float, two: float | None = None, weights: WeightComparison | None = SAME) -> BenchRow:
    times = {1: time(one)} | ({} if two is None else {2: time(two)})
    return BenchRow(Contender(f"lockstep-{lanes}", f"lockstep, {lanes} lanes", "lockstep", lanes), times, weights)


def test_a_clear_difference_is_reported_with_its_spread() -> None:
    rows = [*by_hand(), lockstep(1, 1.12, weights=None), lockstep(2, 1.5, 0.93), lockstep(8, 3.9, 1.7)]
    assert judge_rows(rows, 2, *CORES) == (
        [
            "On one process, a step of lockstep with 1 lane takes 12% longer than hand-written "
            "(×1.12, by round 1.02–1.32); with 8 lanes ×3.90.",
            "On 2 processes, a step of lockstep with 2 lanes takes 7% less than hand-written "
            "(×0.93, by round 0.83–1.13); with 8 lanes ×1.70.",
            "On one process and on 2, lockstep computes the same bits; hand-written, the weights end 0.012 apart.",
        ],
        True,
    )


def test_a_difference_below_the_noise_is_reported_as_unknown() -> None:
    lines, _ = judge_rows([*by_hand(noise=0.2), lockstep(2, 1.12, 2.5)], 2, *CORES)
    doubt = "by round it varies by 0%, and hand-written against itself is off by 20%"
    assert lines[0].endswith(f"(×1.12, by round 1.02–1.32). Too noisy here to tell: {doubt}.")
    assert "noisy" not in lines[1], "there the difference is larger"
    assert "2.5 times as long as hand-written" in lines[1]


def test_a_ratio_that_varies_more_than_it_differs_is_reported_as_unknown() -> None:
    wobbly = lockstep(2, 1.12, 1.12)
    wobbly.times[2] = time(1.12, 0.15)
    lines, _ = judge_rows([*by_hand(), wobbly], 2, *CORES)
    assert "noisy" not in lines[0]
    assert "by round it varies by 15%, and hand-written against itself is off by 1%" in lines[1]


def test_half_a_percent_is_no_difference() -> None:
    lines, _ = judge_rows([*by_hand(noise=0.0), lockstep(2, 1.004, 0.996)], 2, *CORES)
    assert ["takes as long as hand-written" in line for line in lines[:2]] == [True, True]


def test_lockstep_with_other_bits_is_a_bug_and_the_worst_row_is_named() -> None:
    differ = [
        lockstep(2, 1.1, 1.1, WeightComparison(1e-7, ("d", "e"))),
        lockstep(8, 2.0, 2.0, WeightComparison(0.5, ("f", "g"))),
    ]
    lines, is_kept = judge_rows([*by_hand(), *differ], 2, *CORES)
    assert not is_kept
    assert lines[-1].startswith(
        "LOCKSTEP'S OWN BITS DIFFER between one process and 2: lockstep, 8 lanes, by up to 0.5."
    )
    same_numbers = WeightComparison(0.0, ("d", "e"))  # as 0 and -0 are
    assert not judge_rows([*by_hand(), lockstep(2, 1.1, 1.1, same_numbers)], 2, *CORES).is_kept


def test_only_lockstep_mode_breaks_the_promise_by_differing_or_failing() -> None:
    fast = BenchRow(
        Contender("fast", "lockstep, fast mode", "fast"),
        {1: time(1.0), 2: time(1.0)},
        WeightComparison(0.1, ("h", "i")),
    )
    assert judge_rows([*by_hand(), fast], 2, *CORES) == ([], True), "nothing is said without lockstep mode"
    failed = BenchRow(Contender("lockstep-2", "lockstep, 2 lanes", "lockstep", 2), {}, failure="ValueError: no")
    assert not judge_rows([*by_hand(), failed], 2, *CORES).is_kept
    peer = BenchRow(Contender("fabric", "Fabric", "fabric"), {}, failure="ImportError: no")
    assert judge_rows([*by_hand(), lockstep(2, 1.1, 1.1), peer], 2, *CORES).is_kept


def test_more_processes_than_cores_are_reported() -> None:
    rows = [*by_hand(), lockstep(2, 1.1, 1.1)]
    words = "2 processes share 1 core here: the time of a step on 2 says little."
    assert words in judge_rows(rows, 2, 1, "core").lines
    assert words not in judge_rows(rows, 2, 2, "cores").lines
