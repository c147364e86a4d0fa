"""Ratios of interleaved times, and timing variants in turn."""

import pytest

from lockstep.bench.interleaved_timing import interleave, time_ratio, timing_table


def test_variants_are_compared_round_by_round() -> None:
    """A round in which the machine was ten times slower does not distort the ratio."""
    found = time_ratio([0.2, 2.0, 0.3], [0.1, 1.0, 0.1])
    assert found[:3] == pytest.approx((2.0, 2.0, 3.0))
    assert found.difference == pytest.approx(1.0)


def test_noise_comes_from_the_quartiles_not_the_range() -> None:
    calm = time_ratio([0.98, 0.99, 1.0, 1.01, 1.02, 5.0, 0.2], [1.0] * 7)
    assert calm.noise == calm.wobble == pytest.approx(0.015)
    assert (calm.low, calm.high) == (0.2, 5.0), "the range includes all rounds"
    assert time_ratio([0.5, 0.7, 1.0, 1.1, 1.2], [1.0] * 5).noise == pytest.approx(0.3), "also for a faster variant"
    far = time_ratio([2.0, 2.1, 2.2, 2.4, 2.9], [1.0] * 5)
    assert (far.noise, far.wobble) == (pytest.approx(1.4), pytest.approx(0.2)), "from ×1, and from its own median"


def test_a_single_round_is_enough() -> None:
    assert time_ratio([3.0], [2.0]) == (1.5, 1.5, 1.5, 1.5, 1.5)


def test_every_variant_runs_once_per_round_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []
    timings = interleave({name: lambda name=name: calls.append(name) for name in ("a", "b")}, rounds=2, steps=10)  # type: ignore[misc]
    assert calls == ["a", "b"] * 3
    assert [timing.name for timing in timings] == ["a", "b"]
    assert timings[0].ratio == (1.0, 1.0, 1.0, 1.0, 1.0), "ratios are relative to the first variant"
    title, _, _, *rows = timing_table("a title", timings).splitlines()
    assert title == "a title"
    assert [row.split("|")[1].strip() for row in rows] == ["a", "b"]
