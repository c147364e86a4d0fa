"""Compressed gradients, unused parameters and uneven inputs on a GPU: over NCCL, and over gloo."""

from pathlib import Path

import pytest
import torch

from tests.ranks.rank_reports import rank_reports

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SCRIPT = """
import json, os, sys, tempfile
from pathlib import Path
rank = os.environ.get("RANK", "0")
backend = sys.argv[1]
if backend == "nccl":
    # NCCL refuses two ranks on one GPU of one host: give each its own host id.
    os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
import lockstep
from tests.ranks import compression_workloads as compression
from tests.ranks import uneven_workloads as uneven
from tests.ranks import unused_workloads as unused

def main(world):
    kinds = compression.KINDS if world.size > 1 else {"none": "none"}
    trained = {name: compression.train(world, compression=kind) for name, kind in kinds.items()}
    report = {name: [result.losses, result.traffic] for name, result in trained.items()}
    folder = Path(sys.argv[2])
    compression.train(world, folder, 4, compression=compression.POWERSGD)
    report["resumed"] = [compression.train(world, folder, compression=compression.POWERSGD).losses, {}]
    branches = ["left", "right"] * 2
    found = unused.train(world, branches, determinism="fast", find_unused_parameters=True)
    report["unused"] = [found.weights[6][:2], {}]
    for name, case in (("joined", {}), ("joined, bf16", {"compression": "bf16"})):
        report[name] = [uneven.train(world, sized=True, **case).losses, {}]
    sys.stdout.write("report " + json.dumps(report) + "\\n")

if __name__ == "__main__":
    lockstep.launch(main, backend=None if backend == "auto" else backend)
"""


@pytest.mark.parametrize(("size", "backend"), [(2, "nccl"), (4, "nccl"), (2, "gloo")])
def test_gradients_travel_compressed_on_a_gpu(tmp_path: Path, size: int, backend: str) -> None:
    (alone,) = rank_reports(tmp_path, SCRIPT, 1, "auto")
    found = rank_reports(tmp_path, SCRIPT, size, backend)
    assert len(found) == size
    for report in found:
        assert report["none"][1] == {}
        for name, tolerance in {"none": 1e-3, "fp16": 1e-3, "bf16": 5e-3, "powersgd": 0.2}.items():
            losses, traffic = report[name]
            assert losses == pytest.approx(alone["none"][0], rel=tolerance), name
            assert name == "none" or traffic["gradient_bytes"] < 0.51 * traffic["uncompressed_bytes"]
        assert report["resumed"][0] == pytest.approx(report["powersgd"][0][4:], rel=1e-3)
        assert report["unused"] == found[0]["unused"]
        assert report["joined, bf16"][0] == pytest.approx(report["joined"][0], rel=1e-2)
