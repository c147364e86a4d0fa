"""Activation checkpointing and the search for the largest batch on a GPU, over NCCL."""

import json
from pathlib import Path

import pytest
import torch

from tests.commands import LOCKSTEP, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SCRIPT = """
import os, sys
rank = os.environ.get("RANK", "0")
os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
import torch, lockstep
from lockstep.train.activation_checkpointing import checkpoint_activations
from tests.contracts import workloads
from tests.contracts.checkpointed_blocks import sharded_gradients, train_blocks

LOADER = {"global_batch": 32, "lanes": 8}

def main(world):
    for recomputed in ({}, {"activation_checkpointing": {}}):
        for options in ({}, {"precision": "bf16"}, {"precision": "fp16"}):
            trained = train_blocks(world, 4, **recomputed, **options)
            sys.stdout.write(f"blocks {options.get('precision')} {trained.digest}\\n")
        trained = workloads.train(world, "gpt", 5, LOADER, clip_norm=0.1, **recomputed)
        sys.stdout.write(f"gpt {trained.digest}\\n")
    if world.size > 1:
        kept, before, after = sharded_gradients(world)
        assert all(map(torch.equal, kept, before)) and all(map(torch.equal, kept, after))
        sys.stdout.write("fsdp same\\n")
    peaks = []
    for is_recomputed in (False, True):
        model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True), 12)
        model.to(world.device)
        if is_recomputed:
            checkpoint_activations(model)
        torch.cuda.reset_peak_memory_stats()
        model(torch.randn(16, 256, 256, device=world.device)).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated())
        del model
    assert peaks[1] < 0.6 * peaks[0], peaks

if __name__ == "__main__":
    lockstep.launch(main, backend="nccl")
"""


def test_checkpointing_changes_no_bit_on_one_process_or_several(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    found = {}
    for size in (1, 2, 4):
        finished = run([*LOCKSTEP, "run", "-n", str(size), "script.py"], tmp_path, timeout_s=300)
        assert finished.code == 0, finished.err
        found[size] = {line for line in finished.out.splitlines() if line.startswith(("blocks", "gpt"))}
        assert finished.out.count("fsdp same") == (size if size > 1 else 0)
    assert len(found[1]) == 4, "with and without are the same"
    assert found[1] == found[2] == found[4]


def test_the_search_survives_running_out_of_the_gpus_memory(tmp_path: Path) -> None:
    command = [*LOCKSTEP, "batch", "gpt", "data.length=512", "model.width=512", "model.depth=8"]
    finished = run([*command, "--memory-gb", "2", "--tries", "9", "--json"], tmp_path, timeout_s=400)
    assert finished.code == 0, finished.err
    found = json.loads(finished.out)
    assert found["device"] == "cuda"
    assert any(each["why"] == "out of memory" for each in found["tries"])
    peaks = [each["peak_bytes"] for each in found["tries"] if each["fits"]]
    assert 0 < max(peaks) < 2e9
