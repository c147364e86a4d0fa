"""Another user of the machine, who can connect to every port on loopback, cannot stop a job through its stores."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.commands import LOCKSTEP, clean_environment, descendants, started, wait_for

# Becomes another user if it may; reads ports from its input, and overwrites and deletes all keys in the store at each.
INTRUDER = """
import os, sys, threading
from contextlib import suppress
from datetime import timedelta
from torch.distributed import TCPStore

if os.geteuid() == 0:  # only now: this interpreter may be in a folder that others cannot enter
    os.setgroups([])
    os.setuid(65534)

def disturb(port):
    with suppress(RuntimeError):
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1))
        print("inside", flush=True)
        while True:
            for key in store.list_keys():
                store.set(key, "garbage")
                store.delete_key(key)

print("ready", flush=True)
for line in sys.stdin:
    threading.Thread(target=disturb, args=[int(line)], daemon=True).start()
"""

TORCH_JOIN = "dist.init_process_group('gloo', timeout=timedelta(seconds=5))"
LOCKSTEP_JOIN = "import lockstep; lockstep.setup_distributed(device='cpu', timeout_s=5)"

SCRIPT = """
import pathlib, time
from datetime import timedelta
import torch, torch.distributed as dist
for join in range(3):
    {join}
    pathlib.Path("joined").touch()
    while not pathlib.Path("disturbed").exists():
        time.sleep(0.01)
    for _ in range(5):
        dist.all_reduce(torch.ones(1), group=dist.new_group())
    dist.destroy_process_group()
"""


def listening_ports(pid: int) -> set[int]:
    return {
        connection.laddr.port
        for process in [psutil.Process(pid), *descendants(pid)]
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.mark.parametrize(
    ("join", "options"),
    [(TORCH_JOIN, []), (TORCH_JOIN, ["--cold"]), (LOCKSTEP_JOIN, [])],
    ids=["torch", "torch, imported by the script", "lockstep"],
)
def test_keys_written_by_another_user_do_not_reach_the_job(tmp_path: Path, join: str, options: list[str]) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(join=join))
    intruder = subprocess.Popen(
        [sys.executable, "-c", INTRUDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=clean_environment() | {"OMP_NUM_THREADS": "1"},
        text=True,
        bufsize=1,
    )
    with intruder, started([*LOCKSTEP, "run", "-n", "2", *options, "script.py"], tmp_path) as job:
        assert intruder.stdin is not None
        assert intruder.stdout is not None
        try:
            assert intruder.stdout.readline() == "ready\n"
            wait_for((tmp_path / "joined").exists, 60, "the ranks have joined")
            for port in listening_ports(job.pid):
                print(port, file=intruder.stdin)
            assert intruder.stdout.readline() == "inside\n", "at least the store at MASTER_PORT is open to everyone"
            (tmp_path / "disturbed").touch()
            _, err = job.communicate(timeout=60)
        finally:
            intruder.kill()
    assert job.returncode == 0, err
