"""A search with its network on a GPU: the same bits on any number of ranks, over NCCL and over gloo."""

from pathlib import Path

import pytest
import torch

from tests.ranks.rank_reports import rank_reports

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SCRIPT = """
import json, os, sys
rank = os.environ.get("RANK", "0")
backend = sys.argv[1]
if backend == "nccl":
    # NCCL refuses two ranks on one GPU of one host: give each its own host id.
    os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
import lockstep
from tests.ranks.search_workloads import searched

def main(world):
    assert world.device.type == "cuda"
    report = {problem: searched(world, f"{sys.argv[2]}-{problem}", problem)[0] for problem in ("one", "several")}
    sys.stdout.write("report " + json.dumps(report) + "\\n")

if __name__ == "__main__":
    lockstep.launch(main, backend=None if backend == "auto" else backend)
"""


def test_the_network_on_a_gpu_chooses_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    (alone,) = rank_reports(tmp_path, SCRIPT, 1, "auto")
    for size, backend in ((2, "nccl"), (3, "nccl"), (2, "gloo")):
        found = rank_reports(tmp_path, SCRIPT, size, backend)
        assert len(found) == size
        assert all(report == alone for report in found)
