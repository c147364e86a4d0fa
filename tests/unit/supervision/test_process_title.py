"""Titles of processes, as `ps` shows them: never longer than the command line, and without arguments."""

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.supervision.process_title import describe_target

# Prints what /proc shows of it and of a fork, before, during and after it is an agent; then as a rank.
PROGRAM = """
import os, sys
from pathlib import Path
from lockstep.config.placement import Placement
from lockstep.supervision import process_title

def show():
    arguments = Path("/proc/self/cmdline").read_bytes()
    print(arguments.rstrip(b"\\0").decode(), Path("/proc/self/comm").read_text().strip(), sep="|", flush=True)

length = len(Path("/proc/self/cmdline").read_bytes())
with process_title.titled_agent("train.py"):
    show()
assert Path("/proc/self/cmdline").read_bytes().endswith(b"--token\\0secret\\0")
process_title.title_rank(Placement(rank=1, world_size=4), "train.py")
process_title.title_forks_of_rank()
show()
if os.fork() == 0:
    show()
    os._exit(0)
os.wait()
process_title.title_rank(Placement(rank=1, world_size=4), "x" * 10_000)
assert len(Path("/proc/self/cmdline").read_bytes()) == length
assert os.environ["KEPT"] == "kept" and b"KEPT=kept" in Path("/proc/self/environ").read_bytes()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="titles are shown on Linux only")
def test_what_ps_shows(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), "--token", "secret"]
    finished = subprocess.run(
        command, env={"KEPT": "kept"}, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines() == [
        "lockstep: agent, train.py|lockstep agent",
        "lockstep: rank 1 of 4, train.py|rank 1/4",
        "lockstep: child of rank 1 of 4, train.py|lockstep child",
    ]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (["scripts/train.py", "--token", "secret"], "train.py"),
        (["-m", "package.train", "--token", "secret"], "package.train"),
        (["-m", "lockstep", "train", "configs/mine.yaml", "log.key=secret"], "train mine.yaml"),
    ],
)
def test_a_title_names_the_script_alone(target: list[str], words: str) -> None:
    assert describe_target(target) == words
