"""The choice of device and backend, and the warnings about processes that bring no parallelism."""

import pytest
import torch

from lockstep.config.placement import Placement
from lockstep.errors import WorldError
from lockstep.world.device import choose_backend, choose_device, warn_if_no_parallelism

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("system", "device", "backend"),
    [
        ("linux", "cuda", "nccl"),
        ("linux", "cpu", "gloo"),
        ("darwin", "cuda", "nccl"),
        ("darwin", "mps", "gloo"),
        ("darwin", "cpu", "gloo"),
        ("win32", "cuda", "gloo"),
        ("win32", "cpu", "gloo"),
    ],
)
def test_backend_table(system: str, device: str, backend: str) -> None:
    assert choose_backend(device, system=system) == backend


def test_a_shared_gpu_cannot_use_nccl() -> None:
    assert choose_backend("cuda", devices_are_shared=True, system="linux") == "gloo"


def test_a_requested_device_is_used() -> None:
    assert choose_device(Placement(), "cpu") == CPU
    assert choose_device(Placement(), CPU) == CPU


def test_each_process_gets_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    placed = [choose_device(Placement(rank=r, local_rank=r, world_size=4), None).index for r in range(4)]
    assert placed == [0, 1, 0, 1]
    assert choose_device(Placement(local_rank=1), "cuda:0").index == 0
    with pytest.raises(WorldError, match="device=cuda:5, but torch sees 2 CUDA devices: use cuda:0 to cuda:1, or omit"):
        choose_device(Placement(), "cuda:5")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(WorldError, match="device=cuda:1, but torch sees 1 CUDA device: use cuda:0, or omit the number"):
        choose_device(Placement(), "cuda:1")


def test_mps_for_one_process_but_cpu_for_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device(Placement()).type == "mps"
    pair = Placement(world_size=2, local_world_size=2)
    assert choose_device(pair).type == "cpu"
    warnings: list[str] = []
    warn_if_no_parallelism(pair, CPU, warnings.append)
    assert len(warnings) == 1
    assert "no parallelism" in warnings[0]


@pytest.mark.parametrize(("requested", "words"), [("cuda", "no CUDA"), ("mps", "no MPS"), ("tpu9", "tpu9")])
def test_a_missing_device_is_named(requested: str, words: str) -> None:
    if requested == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(WorldError, match=words):
        choose_device(Placement(), requested)


def test_warns_of_one_process_and_of_a_shared_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    warn_if_no_parallelism(Placement(launcher="torchrun"), CPU, warnings.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    warn_if_no_parallelism(Placement(world_size=2, local_world_size=2), torch.device("cuda", 0), warnings.append)
    assert ["no parallelism" in warning for warning in warnings] == [True, True]
    assert "2 processes share 1 CUDA device:" in warnings[1]


def test_no_warning_where_processes_help() -> None:
    warnings: list[str] = []
    warn_if_no_parallelism(Placement(world_size=2, local_world_size=2), CPU, warnings.append)
    assert warnings == []
