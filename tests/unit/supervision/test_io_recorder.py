"""What a rank prints and writes is recorded. In a separate process, because recording cannot be undone."""

import json
import subprocess
import sys
from pathlib import Path

from lockstep.supervision.io_recorder import OutputRecord

SCRIPT = """
import os, sys
from pathlib import Path
from lockstep.supervision.io_recorder import OutputRecord, record_output
import safetensors.torch
from safetensors.torch import save_file

here = Path(sys.argv[1])
record_output(OutputRecord(here / "seen", 1))
import torch

print("printed")
os.system("echo printed by another program")
(here / "text").write_text("x")
(here / "text").read_text()
(here / "text").rename(here / "renamed")
torch.save({}, here / "torch.pt")
torch.save(obj={}, f=str(here / "named.pt"))
with (here / "file.pt").open("wb") as file:
    torch.save({}, file)
save_file({"a": torch.ones(1)}, here / "tensors.safetensors")
os.write(os.open(here / "low", os.O_WRONLY | os.O_CREAT), b"x")
"""


def test_what_a_rank_prints_and_writes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert finished.stdout == ""
    files = OutputRecord(tmp_path / "seen", 1)
    assert sorted(files.output.read_text().splitlines()) == ["printed", "printed by another program"]
    written = [json.loads(line) for line in files.written.read_text().splitlines()]
    names = [Path(path).name for path in written if Path(path).parent == tmp_path]
    assert names == ["text", "renamed", "torch.pt", "named.pt", "file.pt", "tensors.safetensors", "low"]
