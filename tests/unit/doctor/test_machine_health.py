"""What the doctor says about a machine, and about processes that run on it together."""

from typing import Any

import pytest

from lockstep.doctor.machine_health import HealthFinding, MachineInfo, ProbeResult, examine_machine, is_fit


def machine(**changes: Any) -> MachineInfo:
    good: dict[str, Any] = {
        "system": "Linux x86_64",
        "python": "3.11.7",
        "torch": "2.13.0+cpu",
        "cores": 4,
        "available_bytes": 8 * 10**9,
        "shared_free_bytes": 2**30,
        "max_open_files": 65536,
        "devices": (),
        "has_gpu_without_torch": False,
        "has_mps": False,
        "flush_s": 0.1,
        "variables": {},
    }
    return MachineInfo(**(good | changes))


def ranks(**changes: Any) -> ProbeResult:
    good: dict[str, Any] = {
        "backend": "gloo",
        "device": "cpu",
        "join_s": 0.3,
        "alone_s": 0.1,
        "together_s": (0.1, 0.11),
        "message_s": 2e-4,
        "bytes_per_s": 1e9,
    }
    return ProbeResult(**(good | changes))


def remarks(findings: list[HealthFinding]) -> list[tuple[str, str]]:
    return [(finding.level, finding.words) for finding in findings if finding.level != "ok"]


def test_a_good_machine_has_no_remarks() -> None:
    findings = examine_machine(machine(), ranks())
    assert remarks(findings) == []
    assert is_fit(findings)


@pytest.mark.parametrize(
    ("changes", "level", "text"),
    [
        ({"torch": "2.9.1"}, "problem", "torch 2.9.1 is too old"),
        ({"has_gpu_without_torch": True}, "warning", "install torch's CUDA build"),
        ({"has_mps": True}, "note", "more would share it and gain nothing"),
        ({"shared_free_bytes": 64 * 2**20}, "warning", "only 64 MiB of shared memory"),
        ({"max_open_files": 256}, "warning", "ulimit -n"),
        ({"flush_s": None}, "warning", "is not writable"),
        ({"flush_s": 3.0}, "note", "checkpoint.every"),
        (
            {"variables": {"RANK": "0", "WORLD_SIZE": "4"}},
            "warning",
            "RANK, WORLD_SIZE are set in this shell: without -n",
        ),
        ({"variables": {"LOCAL_RANK": "0"}}, "warning", "LOCAL_RANK is set in this shell, but RANK is not"),
        ({"variables": {"MASTER_ADDR": "n1"}}, "note", "MASTER_ADDR=n1 is set and will be respected"),
        ({"variables": {"NCCL_P2P_DISABLE": "1"}}, "note", "NCCL_P2P_DISABLE=1 is set"),
    ],
)
def test_a_problem_is_one_line_with_its_remedy(changes: dict[str, Any], level: str, text: str) -> None:
    findings = examine_machine(machine(**changes))
    ((found_level, found_text),) = remarks(findings)
    assert found_level == level
    assert text in found_text
    assert is_fit(findings) == (level != "problem")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"together_s": (0.1,) * 8}, "8 processes share 4 cores: start at most 4"),
        (
            {"together_s": (0.2, 0.2)},
            "2.00 times as long as one alone: they compete for the machine, so 2 processes do the work of about",
        ),
        ({"together_s": (0.1, 0.1, 0.19)}, "rank 2 is slow: the same work takes 1.90 times"),
        ({"message_s": 0.02}, "the smallest all-reduce takes 20.00 ms"),
    ],
)
def test_processes_that_slow_each_other_down(changes: dict[str, Any], text: str) -> None:
    ((level, found),) = remarks(examine_machine(machine(), ranks(**changes)))
    assert level == "warning"
    assert text in found


def test_there_may_be_more_processes_on_gpus_than_cores() -> None:
    many = ranks(device="cuda", backend="nccl", together_s=(0.1,) * 8)
    assert remarks(examine_machine(machine(devices=("A",) * 8), many)) == []
