"""The primitives on a GPU: over NCCL, and over gloo where several processes share one device."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands import LOCKSTEP, run
from tests.contracts import mesh_cases, zero_workloads

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SCRIPT = """
import json, os, sys
rank = os.environ.get("RANK", "0")
if "nccl" in sys.argv:
    # NCCL refuses two ranks on one GPU of one host: give each its own host id.
    os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
import torch, lockstep

def main(world):
    own = torch.full((3,), float(world.rank + 1), device=world.device)
    model = torch.nn.Linear(2, 2).to(world.device)
    wrapped = torch.nn.parallel.DistributedDataParallel(model) if world.size > 1 else model
    wrapped(torch.ones(1, 2, device=world.device) * (world.rank + 1)).sum().backward()
    sys.stdout.write(json.dumps({
        "rank": world.rank, "backend": world.backend, "device": str(world.device),
        "sum": lockstep.all_reduce(own.clone()).tolist(), "mean": lockstep.reduce_tensor(own).tolist(),
        "all": [part[0].item() for part in lockstep.all_gather(own)],
        "broadcast": lockstep.broadcast(own.clone()).tolist(), "gradient": model.weight.grad[0, 0].item(),
        "objects": [{**o, "t": o["t"].tolist()} for o in lockstep.all_gather_object({"r": world.rank, "t": own})],
        "from_0": lockstep.broadcast_object("hello" if world.rank == 0 else None),
    }) + "\\n")
    lockstep.barrier()
    if "fail" in sys.argv and world.rank == world.size - 1:
        raise ValueError("planted")

if __name__ == "__main__":
    backend = "nccl" if "nccl" in sys.argv else None
    lockstep.launch(main, nproc="auto" if "auto" in sys.argv else None, backend=backend)
"""


RESUMING = """
import os, sys
from pathlib import Path
rank = os.environ.get("RANK", "0")
os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
import lockstep
from tests.contracts import resume_workloads, workloads

def main(world):
    folder, stop = Path(sys.argv[1]), int(sys.argv[2]) or None
    gpt = workloads.train(world, "gpt", 5, {"global_batch": 32, "lanes": 8}, folder / "gpt", stop)
    everything = resume_workloads.train_all(world, folder / "everything", stop, precision="fp16")
    sys.stdout.write(f"digest {gpt.digest} {everything.digest}\\n")

if __name__ == "__main__":
    lockstep.launch(main, backend="nccl")
"""


BITS = """
import os, sys
rank = os.environ.get("RANK", "0")
if "nccl" in sys.argv:
    os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
import torch, lockstep
from tests.contracts import whole_step_cases, workloads, zero_workloads

def main(world):
    strategy = {"parallel": sys.argv[3]}
    for name in sys.argv[1].split(","):
        if name in workloads.WORKLOADS:
            trained = workloads.train(world, name, 5, {"global_batch": 32, "lanes": 8}, clip_norm=0.1, **strategy)
        elif name in zero_workloads.OPTIMIZERS:
            trained = zero_workloads.train_wide(world, name, **strategy)
        else:
            options, around = whole_step_cases.CASES[name.replace("-", " ")]
            trained = whole_step_cases.train(world, options | strategy, **around)
        sys.stdout.write(f"{name} {trained.digest}\\n")

if __name__ == "__main__":
    lockstep.launch(main, backend="nccl" if "nccl" in sys.argv else None)
"""


MESH = """
import json, os, sys
from pathlib import Path
rank = os.environ.get("RANK", "0")
os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
import lockstep
from tests.contracts import mesh_cases, mesh_workloads

def main(world):
    name, folder, stop = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) or None
    options = mesh_cases.MESHES[name][1] if name in mesh_cases.MESHES else {}
    tied = {"tied": options.pop("tied", True)}
    if stop is not None:
        trained = mesh_workloads.train_gpt(world, folder, stop, steps=len(mesh_cases.MESHES) + 1, **options)
        numbers = trained.losses
    else:
        trained = mesh_workloads.train_gpt(world, **tied, **options)
        if "fsdp" in options:
            options["fsdp"] = {**options["fsdp"], "wrap": (), "min_parameters": 20}
        names = [] if "tensor_plan" in options else list(mesh_workloads.SMALL)
        small = [losses for losses, _ in mesh_cases.train_many(world, names, **options)]
        numbers = [trained.losses, trained.norms, [each["loss"] for each in trained.metrics], small]
    sys.stdout.write(json.dumps([trained.began_with, trained.digest, numbers]) + "\\n")

if __name__ == "__main__":
    lockstep.launch(main, backend="nccl")
"""


def train_on_a_mesh(name: str, tmp_path: Path, stop: int = 0) -> tuple[str, str, Any]:
    (tmp_path / "script.py").write_text(MESH)
    size = mesh_cases.MESHES[name][0] if name in mesh_cases.MESHES else 1
    command = [*LOCKSTEP, "run", "-n", str(size), "script.py", name, str(tmp_path / "run"), str(stop)]
    finished = run(command, tmp_path)
    assert finished.code == 0, finished.err
    reports = [json.loads(line) for line in finished.out.splitlines() if line.startswith("[")]
    assert len(reports) == size
    assert all(report[:2] == reports[0][:2] for report in reports)
    return tuple(reports[0])


@pytest.mark.timeout(600)
def test_a_mesh_over_nccl_trains_as_one_process_does(tmp_path: Path) -> None:
    """In double precision; sums over ranks differ in their last bits. Untied models are only trained, not compared."""
    *alone, small_alone = train_on_a_mesh("one process", tmp_path)[2]
    for name in mesh_cases.MESHES:
        *ours, small = train_on_a_mesh(name, tmp_path)[2]
        if name in mesh_cases.TIED:
            for kind, (values, expected) in enumerate(zip(ours, alone, strict=True)):
                assert values == pytest.approx(expected, rel=1e-9), (name, kind)
            for values, expected in zip(small, small_alone if small else (), strict=True):
                assert values == pytest.approx(expected, rel=1e-9), name


@pytest.mark.timeout(600)
def test_a_run_resumes_under_any_mesh_over_nccl(tmp_path: Path) -> None:
    digests: list[str] = []
    for number, name in enumerate(("one process", *mesh_cases.TIED), start=1):
        began_with, digest, _ = train_on_a_mesh(name, tmp_path, number)
        assert not digests or began_with == digests[-1], name
        digests.append(digest)
    assert len(set(digests)) == len(digests), "every step changed the weights"


def test_the_same_bits_on_one_process_and_on_several_that_share_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(BITS)
    names = ["mlp", "conv", "gpt", "gan", "awkward", "passes", "terms"]  # cuDNN's LSTM is not deterministic
    names += ["bf16", "fp16", "everything", "everything-in-fp16"]
    reports = {}
    names += [name for name in zero_workloads.OPTIMIZERS if " " not in name]
    for size, backend, parallel in (
        *((1, "nccl", "single"), (2, "nccl", "ddp"), (3, "nccl", "ddp"), (4, "nccl", "ddp"), (2, "gloo", "ddp")),
        *((2, "nccl", "zero"), (3, "nccl", "zero"), (4, "nccl", "zero"), (2, "gloo", "zero")),
    ):
        command = [*LOCKSTEP, "run", "-n", str(size), "script.py", ",".join(names), backend, parallel]
        finished = run(command, tmp_path)
        assert finished.code == 0, finished.err
        reports[size, backend, parallel] = sorted(
            line for line in finished.out.splitlines() if line.split()[0] in names
        )
    for (size, _, _), lines in reports.items():
        assert sorted(set(lines)) == reports[1, "nccl", "single"], reports
        assert len(lines) == size * len(names)


def test_a_run_resumes_on_another_number_of_processes_over_nccl(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(RESUMING)

    def digests(folder: str, size: int, stop: int = 0) -> set[str]:
        finished = run([*LOCKSTEP, "run", "-n", str(size), "script.py", str(tmp_path / folder), str(stop)], tmp_path)
        assert finished.code == 0, finished.err
        return {line for line in finished.out.splitlines() if line.startswith("digest")}

    whole = digests("whole", 1)
    assert len(whole) == 1
    for stop, before, after in ((2, 2, 1), (3, 1, 3)):
        digests(f"stopped-{stop}", before, stop)
        assert digests(f"stopped-{stop}", after) == whole


@pytest.mark.parametrize(("size", "argument"), [(2, "nccl"), (3, "nccl"), (2, "auto backend")])
def test_several_processes_on_one_gpu(tmp_path: Path, size: int, argument: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    finished = run([*LOCKSTEP, "run", "-n", str(size), "script.py", argument], tmp_path)
    assert finished.code == 0, finished.err
    reports = [json.loads(line) for line in finished.out.splitlines() if line.startswith("{")]
    assert sorted(report["rank"] for report in reports) == list(range(size))
    total = size * (size + 1) / 2
    shared = size > torch.cuda.device_count()
    for report in reports:
        assert report["backend"] == ("gloo" if shared and argument != "nccl" else "nccl")
        assert report["device"] == f"cuda:{report['rank'] % torch.cuda.device_count()}"
        assert report["sum"] == [total] * 3
        assert report["mean"] == [total / size] * 3
        assert report["gradient"] == total / size
        assert report["all"] == [rank + 1.0 for rank in range(size)]
        assert report["broadcast"] == [1.0] * 3
        assert [value["r"] for value in report["objects"]] == list(range(size))
        assert report["objects"][-1]["t"] == [float(size)] * 3
        assert report["from_0"] == "hello"
    assert ("brings no parallelism" in finished.err) == shared


def test_a_failing_rank_is_named_over_nccl(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    finished = run([*LOCKSTEP, "run", "-n", "2", "script.py", "nccl", "fail"], tmp_path)
    assert finished.code == 3
    assert re.search("rank 1 of 2 on .* failed.*, the cause: ValueError: planted", finished.err), finished.err


def test_one_process_per_device_from_a_plain_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    finished = run([sys.executable, "script.py", "auto"], tmp_path)
    assert finished.code == 0, finished.err
    assert finished.out.count('"device": "cuda:') == torch.cuda.device_count()
