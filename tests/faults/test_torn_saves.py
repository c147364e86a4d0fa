"""No end of a save, however sudden, leaves a torn checkpoint or loses a committed one."""

import json
import sys
from pathlib import Path

import pytest

from tests.commands import run
from tests.faults.ended_saves import SCENARIOS
from tests.faults.system_calls import can_follow

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not can_follow(), reason="system calls are followed on Linux, on x86_64 and aarch64")


def ended(module: str, *arguments: str, timeout_s: float = 150) -> list[dict[str, int]]:
    """What a module of ours says of its tries; it checks what each one leaves by itself."""
    finished = run([sys.executable, "-m", f"tests.faults.{module}", *arguments], ROOT, timeout_s=timeout_s)
    assert finished.code == 0, finished.err
    print(finished.out)
    return [json.loads(line) for line in finished.out.splitlines()]


@pytest.mark.parametrize("way", ["kill", "cut"])
def test_a_save_that_ends_at_every_fifth_call(tmp_path: Path, way: str) -> None:
    told = ended("ended_saves", way, str(tmp_path), "5", *SCENARIOS)
    assert all(each["tries"] >= 6 for each in told)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["kill", "cut"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_save_that_ends_at_any_call(tmp_path: Path, way: str, scenario: str) -> None:
    (told,) = ended("ended_saves", way, str(tmp_path), "1", scenario)
    assert told["tries"] > 25


def test_a_run_whose_power_is_cut_after_any_call_goes_on_to_the_same_result(tmp_path: Path) -> None:
    (told,) = ended("cut_runs", str(tmp_path))
    assert told["calls"] > 100
    assert told["resumed"] > 5
