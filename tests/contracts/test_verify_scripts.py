"""`lockstep verify script.py` through the real command, with and without a lockstep loop."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import LOCKSTEP, Finished, call, run
from tests.planted import temporary

TIMEOUT_S = 300  # three to six runs, on a machine that may be busy
pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)

# Plain PyTorch: it never imports lockstep.
PLAIN = """
import argparse
from pathlib import Path
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--wrong", default="")
args = parser.parse_args()
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 3))
model = model if args.wrong == "unwrapped" else DistributedDataParallel(model)
stream = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(256, 20, generator=stream), torch.randint(0, 3, (256,), generator=stream))
loader = DataLoader(data, args.batch_size, sampler=DistributedSampler(data, shuffle=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, labels in loader:
    loss = F.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print("loss", loss.item())
        torch.save(model.state_dict(), "model.pt")
    elif args.wrong == "unwrapped":
        Path(f"rank-{rank}.txt").write_text("me too")
        print("me too")
"""

OWN_LOOP = """
import sys
import torch
import torch.nn.functional as F
import lockstep


def loss(model, batch):
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)


def main(world):
    folder, steps = sys.argv[1:]
    run = lockstep.Run(folder or None, world, seed=7)
    model = run.prepare(torch.nn.Linear(8, 3))
    optimizer = run.optimizer(model, lambda params: torch.optim.AdamW(params, lr=3e-3))
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    for step in run.steps(run.loader(data, global_batch=16, lanes=4), steps=int(steps)):
        step.accumulate(loss, model)
        step.update(optimizer)
    print("done", world.rank)


if __name__ == "__main__":
    lockstep.launch(main)
"""


def verify(folder: Path, script: str, *arguments: str) -> Finished:
    (folder / "train.py").write_text(script)
    temporary(folder).mkdir()
    return run([*LOCKSTEP, "verify", *arguments], folder, {"TMPDIR": str(temporary(folder))}, timeout_s=TIMEOUT_S)


def checklist(report: dict[str, Any]) -> list[bool | None]:
    return [check["holds"] for check in report["checklist"]]


def test_plain_data_parallel_training_differs_by_rounding(tmp_path: Path) -> None:
    options = ["--steps", "2", "--json", "--keep", "kept", "--one-args", "--batch-size 64"]
    found = verify(tmp_path, PLAIN, *options, "train.py", "--batch-size", "32")
    assert found.code == 0, found.out + found.err
    report = json.loads(found.out)
    assert (report["result"], report["equal"]) == ("rounding", False)
    one, many = report["trials"]
    assert (one["is_rounding"], many["is_rounding"]) == (False, True)
    assert (one["steps"], many["steps"]) == (2, 2)
    assert many["difference"]["step"] == 1
    assert many["difference"]["phase"] == "gradient"
    assert many["size"].startswith("by up to ")
    assert report["cause"].startswith("This is rounding: ")
    assert checklist(report) == [True, True, True, True, None, None, False, None]
    assert report["checklist"][2]["evidence"] == "rank 0 wrote 1 file, rank 1 nothing"
    assert report["checklist"][3]["evidence"] == "rank 0 printed 1 line, rank 1 nothing"
    assert (tmp_path / report["folder"] / "ranks" / "many-1" / "digests.jsonl").exists()


@pytest.mark.slow
def test_a_script_that_does_not_share_its_gradients(tmp_path: Path) -> None:
    options = ["--steps", "2", "-n", "2", "--one-args", "--batch-size 64"]
    found = verify(tmp_path, PLAIN, *options, "train.py", "--wrong", "unwrapped")
    assert found.code == 6, found.out + found.err
    assert "different: 2 processes: first at step 1, in its gradient: 0.weight and 3 more, by up to " in found.out
    assert "one process, once more  the same" in found.out
    assert "rank 1 of 2 used a different gradient than rank 0 (0.weight): it was not averaged" in found.out
    assert "[!] only rank 0 creates checkpoints and results: rank 1 wrote rank-1.txt" in found.out
    assert "[!] only rank 0 prints: rank 1 printed 1 line" in found.out


def test_a_short_lockstep_loop_without_a_folder(tmp_path: Path) -> None:
    found = verify(tmp_path, OWN_LOOP, "--steps", "5", "train.py", "", "3")
    assert found.code == 0, found.out + found.err
    lines = found.out.splitlines()
    assert lines[2].startswith("all 2 agree, bit for bit: digest ")
    assert lines[3] == "the script trains for 3 steps, fewer than the 5 asked for"
    assert [line[:3] for line in lines[4:]] == ["[x]", "[x]", "[ ]", "[!]", "[ ]", "[x]", "[x]", "[ ]"]
    assert lines[7] == "[!] only rank 0 prints: rank 1 printed 1 line"
    assert not list(temporary(tmp_path).glob("lockstep-*"))


@pytest.mark.slow
def test_a_lockstep_loop_with_a_folder_is_also_stopped_and_resumed(tmp_path: Path) -> None:
    found = verify(tmp_path, OWN_LOOP, "--steps", "4", "--keep", "kept", "train.py", "runs/mine", "1000")
    assert found.code == 0, found.out + found.err
    lines = found.out.splitlines()
    assert lines[2].split("  ") == ["2 processes, stopped after step 2, resumed on one", "the same"]
    assert lines[4].startswith("all 4 agree, bit for bit: digest ")
    assert [line[:3] for line in lines[5:-1]] == ["[x]", "[x]", "[x]", "[x]", "[ ]", "[x]", "[x]", "[x]"]
    assert not (tmp_path / "runs").exists(), "the script's own folder is left alone"
    trace = tmp_path / "kept" / "one-then-many" / "runs_mine" / "digests.jsonl"
    assert len(trace.read_text().splitlines()) == 4


def test_a_job_set_up_by_hand_does_not_disturb_the_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OWN_LOOP)
    environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "1"}
    command = [*LOCKSTEP, "verify", "--steps", "2", "train.py", "", "2"]
    found = run(command, tmp_path, environment, timeout_s=TIMEOUT_S)
    assert found.code == 0, found.out + found.err
    for launched in ({"RANK": "1"}, {"TORCHELASTIC_RUN_ID": "1"}):
        refused = call(["verify", "train.py"], tmp_path, environment | launched)
        assert refused.code == 2
        assert refused.err == "lockstep: lockstep verify starts its own processes: run it once, without a launcher\n"


def test_what_cannot_be_compared_is_reported_in_one_line(tmp_path: Path) -> None:
    found = verify(tmp_path, "print('nothing to see')", "train.py")
    assert (found.code, found.out) == (2, "")
    assert found.err.splitlines() == [
        "lockstep: one process: nothing was trained, so there is nothing to compare: the script must make steps with a "
        "torch optimizer or lockstep.Run"
    ]
    (tmp_path / "train.py").write_text("raise ValueError('planted')")
    failed = run([*LOCKSTEP, "verify", "train.py", "--any", "argument"], tmp_path)
    assert failed.code == 3
    assert "failed with exit code 3" in failed.out
    assert "ValueError: planted" in failed.err
    for arguments, complaint in (
        (["missing.py"], "missing.py: no such script"),
        (["-m", "no_such_module"], "-m no_such_module: no module named no_such_module"),
        (["--one-args", "'", "train.py"], '--one-args "\'": No closing quotation'),
    ):
        finished = call(["verify", *arguments], tmp_path)
        assert (finished.code, finished.out) == (2, "")
        assert complaint in finished.err
