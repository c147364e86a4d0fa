"""Ranks on a GPU over NCCL: killed ranks resume from memory, and hangs are explained.

The host only starts a collective on a GPU; it waits later, at whatever line asks for a result.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from lockstep.events.jsonl import read_jsonl
from tests.commands import LOCKSTEP, Finished, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# NCCL refuses two ranks on one GPU of one host: give each its own host id.
RANK = """
import os, signal, sys, time
RANK = int(os.environ["RANK"])
os.environ |= {"NCCL_HOSTID": f"host{RANK}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
import torch
"""

LOOP = f"""{RANK}
import lockstep

def loss(model, batch):
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y)

def main(world):
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(512, 16), torch.randint(0, 4, (512,)))
    run = lockstep.Run("run", world, seed=3)
    layers = [torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 4)]
    model = run.prepare(torch.nn.Sequential(*layers))
    optimizer = run.optimizer(model, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    for step in run.steps(run.loader(data, 64, lanes=8), steps=120):
        is_culprit = world.attempt == 0 and RANK == int(sys.argv[2])
        if step.number == 20 and is_culprit and sys.argv[1] == "code":
            time.sleep(1000)  # code
        step.accumulate(loss, model)
        step.update(optimizer)
        time.sleep(0.05)
        if step.number == 100 and is_culprit and sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    if world.is_main:
        sys.stdout.write(f"digest {{run.digest()}}\\n")

lockstep.launch(main, device="cuda:0", backend="nccl")
"""

PLAIN = f"""{RANK}
import torch.distributed as dist
CASE, CULPRIT = sys.argv[1], int(sys.argv[2])
dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(1, 100):
    if number == 4 and RANK == CULPRIT and CASE == "code":
        time.sleep(1000)  # code
    if number == 4 and RANK == CULPRIT and CASE == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)  # stop
    total = model(torch.ones(2, 4, device="cuda")).sum()
    total.backward()
    optimizer.step()
    if not (number == 4 and RANK == CULPRIT and CASE == "skip"):
        dist.all_reduce(total)
    total.item()  # skip
"""


def ended(folder: Path, script: str, num_ranks: int, arguments: Sequence[str], *options: str) -> Finished:
    folder.mkdir()
    (folder / "script.py").write_text(script)
    return run([*LOCKSTEP, "run", "-n", str(num_ranks), *options, "script.py", *arguments], folder)


def test_a_killed_rank_resumes_from_memory(tmp_path: Path) -> None:
    whole = ended(tmp_path / "whole", LOOP, 1, ["none", "0"])
    assert whole.code == 0, whole.err
    for culprit in (0, 1):
        finished = ended(tmp_path / f"{culprit}", LOOP, 2, ["kill", f"{culprit}"], "--max-restarts", "1")
        assert finished.code == 0, finished.err
        assert finished.out.splitlines()[-1] == whole.out.splitlines()[-1]
        events = read_jsonl(tmp_path / f"{culprit}" / "run" / "events.jsonl")
        (first, again) = (event for event in events if event["kind"] == "start")
        assert first["resumed"] is None
        assert 20 <= again["step"] <= 100
        assert again["resumed"] is not None


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize(
    ("script", "case", "kind"),
    [(PLAIN, "code", "idle"), (PLAIN, "stop", "stopped"), (PLAIN, "skip", "mismatch"), (LOOP, "code", "idle")],
    ids=["plain code", "plain stop", "plain skip", "loop code"],
)
def test_a_hang_is_explained(tmp_path: Path, script: str, case: str, kind: str, culprit: int) -> None:
    options = ["--hang-limit", "5", "--hang-stop", "5", "--on-hang", "stop", "--incidents", str(tmp_path / "incidents")]
    finished = ended(tmp_path / "job", script, 2, [case, f"{culprit}"], *options)
    assert finished.code == 5, finished.err
    (report,) = tmp_path.glob("**/incidents/*.json")
    facts = json.loads(report.read_text())
    assert (facts["rank"], facts["hang"], facts["victims"]) == (culprit, kind, [1 - culprit]), finished.err
    line = next(number for number, text in enumerate(script.splitlines(), 1) if text.endswith(f"# {case}"))
    assert facts["line"] == line, finished.err
