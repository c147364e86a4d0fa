"""A kill or a power cut at any point of a save leaves no torn checkpoint and loses no committed one."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import run
from tests.faults.ended_saves import SCENARIOS
from tests.faults.system_calls import can_trace

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    not can_trace(), reason="system calls can be traced only on Linux, on x86_64 and aarch64"
)


def run_helper(module: str, *arguments: str, timeout_s: float = 150) -> list[dict[str, Any]]:
    """Run a helper program, which itself checks what each of its tries leaves behind, and return its counts."""
    finished = run([sys.executable, "-m", f"tests.faults.{module}", *arguments], ROOT, timeout_s=timeout_s)
    assert finished.code == 0, finished.err
    print(finished.out)
    return [json.loads(line) for line in finished.out.splitlines()]


@pytest.mark.parametrize("way", ["kill", "cut"])
def test_a_save_that_ends_at_every_fifth_call(tmp_path: Path, way: str) -> None:
    counts = run_helper("ended_saves", way, str(tmp_path), "5", *SCENARIOS)
    assert [each["scenario"] for each in counts] == list(SCENARIOS)
    assert all(each["tries"] >= 6 for each in counts)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["kill", "cut"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_save_that_ends_at_any_call(tmp_path: Path, way: str, scenario: str) -> None:
    (counts,) = run_helper("ended_saves", way, str(tmp_path), "1", scenario)
    assert counts["tries"] > 25


def test_a_run_resumes_to_the_same_result_after_a_power_cut_at_any_call(tmp_path: Path) -> None:
    (counts,) = run_helper("cut_runs", str(tmp_path))
    assert counts["calls"] > 100
    assert counts["resumed"] > 5
