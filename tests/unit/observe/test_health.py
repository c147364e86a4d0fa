"""What a machine's facts mean."""

from typing import Any

import pytest

from lockstep.observe.health import Finding, Machine, Ranks, examine, is_fit


def machine(**changes: Any) -> Machine:
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
    return Machine(**(good | changes))


def ranks(**changes: Any) -> Ranks:
    good: dict[str, Any] = {
        "backend": "gloo",
        "device": "cpu",
        "join_s": 0.3,
        "alone_s": 0.1,
        "together_s": (0.1, 0.11),
        "message_s": 2e-4,
        "bytes_per_s": 1e9,
    }
    return Ranks(**(good | changes))


def remarks(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.level, finding.words) for finding in findings if finding.level != "ok"]


def test_a_good_machine_has_no_remarks() -> None:
    findings = examine(machine(), ranks())
    assert remarks(findings) == []
    assert is_fit(findings)


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({"torch": "2.9.1"}, "problem", "torch 2.9.1 is too old"),
        ({"has_gpu_without_torch": True}, "warning", "install torch's CUDA build"),
        ({"has_mps": True}, "note", "several bring no parallelism"),
        ({"shared_free_bytes": 64 * 2**20}, "warning", "64 MiB free"),
        ({"max_open_files": 256}, "warning", "ulimit -n"),
        ({"flush_s": None}, "warning", "cannot be written to"),
        ({"flush_s": 3.0}, "note", "checkpoint.every"),
        ({"variables": {"RANK": "0", "WORLD_SIZE": "4"}}, "warning", "RANK, WORLD_SIZE are set in this shell"),
        ({"variables": {"LOCAL_RANK": "0"}}, "warning", "LOCAL_RANK is set in this shell, but RANK is not"),
        ({"variables": {"MASTER_ADDR": "n1"}}, "note", "MASTER_ADDR=n1 is set and will be kept to"),
        ({"variables": {"NCCL_P2P_DISABLE": "1"}}, "note", "NCCL_P2P_DISABLE=1 is set"),
    ],
)
def test_what_is_wrong_is_one_line_with_the_remedy(changes: dict[str, Any], level: str, words: str) -> None:
    findings = examine(machine(**changes))
    ((found_level, found_words),) = remarks(findings)
    assert found_level == level
    assert words in found_words
    assert is_fit(findings) == (level != "problem")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"together_s": (0.1,) * 8}, "8 processes share 4 cores: start at most 4"),
        ({"together_s": (0.2, 0.2)}, "2.00 times as long as one alone: they are in each other's way, and 2 are worth"),
        ({"together_s": (0.1, 0.1, 0.19)}, "rank 2 is slow: 1.90 times"),
        ({"message_s": 0.02}, "the smallest message takes 20.00 ms"),
    ],
)
def test_processes_that_do_not_get_on_are_told(changes: dict[str, Any], words: str) -> None:
    ((level, found),) = remarks(examine(machine(), ranks(**changes)))
    assert level == "warning"
    assert words in found


def test_processes_on_gpus_may_be_more_than_cores() -> None:
    many = ranks(device="cuda", backend="nccl", together_s=(0.1,) * 8)
    assert remarks(examine(machine(devices=("A",) * 8), many)) == []
