"""A healthy job is left alone: a rank that only takes longer than before is reported, and not stopped."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.commands import LOCKSTEP, Finished, run

AT_A_TIME = 3  # launches
LIMIT_S = 2.0
PAUSE_S = 3 * LIMIT_S  # a report is repeated after four times as long

# A quick job that pauses, on rank 0 or on both.
PLAIN = """
import socket, subprocess, sys, threading, time
import torch, torch.distributed as dist

CASE, PAUSE_S = sys.argv[1], float(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()

def trickle(connection):
    ends = time.monotonic() + PAUSE_S
    while time.monotonic() < ends:
        connection.send(b"x")
        time.sleep(0.3)
    connection.close()

def download():
    ours, theirs = socket.socketpair()
    threading.Thread(target=trickle, args=[theirs]).start()
    while ours.recv(1):
        pass

def compute_in_child():
    ends = time.time() + PAUSE_S
    subprocess.run([sys.executable, "-c", f"import time\\nwhile time.time() < {ends}: pass"])

model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(60):
    model(torch.ones(4)).sum().backward()
    optimizer.step()
if CASE == "all ranks" or (rank == 0 and CASE in ("evaluation", "after the last step")):
    time.sleep(PAUSE_S)
if rank == 0 and CASE == "download":
    download()
if rank == 0 and CASE == "child process":
    compute_in_child()
if CASE != "after the last step":
    dist.barrier()
"""

LOOP = """
import sys, time
import lockstep, torch

PAUSE_S = float(sys.argv[2])
torch.set_num_threads(1)

def loss(model, batch):
    return model(batch[0]).sum(), len(batch[0])

def main(world):
    run = lockstep.Run("run", world, seed=1)
    model = run.prepare(torch.nn.Linear(4, 1))
    optimizer = run.optimizer(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    train = run.loader(torch.utils.data.TensorDataset(torch.ones(160, 4)), global_batch=8, lanes=4)
    for step in run.steps(train, steps=20):
        if step.number == 15 and world.rank == 0:
            time.sleep(PAUSE_S)
        step.accumulate(loss, model)
        step.update(optimizer)

lockstep.launch(main, device="cpu")
"""


def paused(folder: Path, case: str, pause_s: float = PAUSE_S, *options: str) -> Finished:
    folder.mkdir(parents=True)
    (folder / "script.py").write_text(LOOP if case == "loop" else PLAIN)
    command = [*LOCKSTEP, "run", "-n", "2", "--hang-limit", str(LIMIT_S), *options]
    return run([*command, "script.py", case, str(pause_s)], folder)


def check_pauses(folder: Path, expected: dict[str, str]) -> None:
    with ThreadPoolExecutor(AT_A_TIME) as pool:  # most of a pause is waiting
        ended = dict(zip(expected, pool.map(lambda case: paused(folder / case, case), expected), strict=True))
    for case, words in expected.items():
        reports = [line for line in ended[case].err.splitlines() if "the report is in" not in line]
        assert ended[case].code == 0, (case, reports)
        if words:
            (report,) = reports
            assert words in report
            assert "If it is meant to take this long, nothing is wrong" in report
            assert "The job ends only after 1800 s without a sign of life (--hang-stop)" in report
        else:
            assert reports == [], case


def test_a_pause_is_reported_once_and_goes_on(tmp_path: Path) -> None:
    expected = {
        "evaluation": "rank 0 of 2",
        "loop": "has made no progress in step 15 (forward and backward pass)",
        "child process": "",  # it uses the CPU: a sign of life
    }
    check_pauses(tmp_path, expected)


@pytest.mark.slow
def test_more_pauses_are_reported_once_and_go_on(tmp_path: Path) -> None:
    expected = {
        "all ranks": "it waits or sleeps at script.py:",
        "download": "in download",
        "after the last step": "rank 0 of 2",
    }
    check_pauses(tmp_path, expected)


@pytest.mark.slow
def test_a_long_pause_is_reported_at_growing_intervals_and_ends_at_the_stop_limit(tmp_path: Path) -> None:
    ended = paused(tmp_path / "run", "evaluation", 90.0, "--hang-stop", "36")
    assert ended.code == 5, ended.err
    reports = [line for line in ended.err.splitlines() if line.startswith("lockstep: rank 0 of 2")]
    assert len(reports) == 3, "after 2 s, 4 times as long, and at the end"
    assert "The job ends only after 36 s" in reports[1]
    assert "The job ends, after more than 36 s without a sign of life (--hang-stop)" in reports[2]


NO_OPTIMIZER = """
import sys, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
x = torch.ones(3)
for _ in range(int(sys.argv[1])):
    dist.all_reduce(x)
if dist.get_rank() == 1:
    time.sleep(1000)
dist.barrier()
"""


def test_a_script_without_an_optimizer_is_reported_as_soon(tmp_path: Path) -> None:
    """Collectives are signs of life, so the time counts from the last of them."""
    (tmp_path / "script.py").write_text(NO_OPTIMIZER)
    command = [*LOCKSTEP, "run", "-n", "2", "--hang-limit", "1", "--hang-stop", "1", "--incidents", "incidents"]
    ended = run([*command, "script.py", "3"], tmp_path)
    assert ended.code == 5
    first = next(line for line in ended.err.splitlines() if "rank 1 of 2" in line)
    reports = [json.loads(path.read_text()) for path in (tmp_path / "incidents").glob("*-hang*.json")]
    assert 0 <= min(report["overdue_s"] for report in reports) <= 5
    assert "it waits or sleeps at script.py:10 in <module>. Rank 0 waits for it in barrier at script.py:11" in first


BUSY = """
import time
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
for step in range(6):
    dist.all_reduce(torch.ones(3))
    ends = time.monotonic() + 2.5
    while time.monotonic() < ends:  # a long forward and backward pass
        torch.ones(200, 200) @ torch.ones(200, 200)
"""


QUIET = """
import time
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
for step in range(20):
    dist.all_reduce(torch.ones(3))
    time.sleep(0.4)
"""


@pytest.mark.slow
def test_passes_and_collectives_without_an_optimizer_are_signs_of_life(tmp_path: Path) -> None:
    for name, text in {"busy.py": BUSY, "quiet.py": QUIET}.items():
        (tmp_path / name).write_text(text)
        ended = run([*LOCKSTEP, "run", "-n", "2", "--hang-limit", "1", name], tmp_path)
        assert (ended.code, ended.err) == (0, ""), name


SLOW_LOOP = """
import os, time
import lockstep, torch
torch.set_num_threads(1)
SLOW_S = 1.8

class Slow:
    def state_dict(self):
        time.sleep(SLOW_S)
        return {}
    def load_state_dict(self, state): pass

class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        time.sleep(SLOW_S / 4)
        return torch.ones(4)

def loss(model, batch):
    return model(batch[0]).sum(), len(batch[0])

def main(world):
    run = lockstep.Run("run", world, seed=1)
    run.register_state("slow", Slow())
    model = run.prepare(torch.nn.Linear(4, 1))
    optimizer = run.optimizer(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    train = run.loader(torch.utils.data.TensorDataset(torch.ones(64, 4)), global_batch=8, lanes=4)
    for step in run.steps(train, steps=4, save_every=4):
        if step.number == 1:
            time.sleep(SLOW_S)
        time.sleep(0.5 if world.rank == 1 else 0.1)
        step.accumulate(loss, model)
        step.update(optimizer)
        if step.number == 3:
            run.evaluate(model, Data(), lambda model, batch: {"x": (model(batch).sum(), len(batch))}, batch=4)

lockstep.launch(main, device="cpu")
"""

SLOW_PLAIN = """
import os, time
import torch, torch.distributed as dist
SLOW_S = 1.8
time.sleep(SLOW_S)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 5):
    if step == 2:  # the first after which the ranks know what a step is
        time.sleep(SLOW_S)
    time.sleep(0.5 if rank == 1 else 0.1)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    if step == 3:
        if rank == 0:  # alone, while the other rank waits for it
            time.sleep(SLOW_S)
        dist.barrier()
"""


def test_what_is_slow_but_alive_is_left_alone(tmp_path: Path) -> None:
    """First step, save and evaluation take six times the limit, and one rank five times as long as the other."""
    scripts = {"plain.py": SLOW_PLAIN, "loop.py": SLOW_LOOP}
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
    command = [*LOCKSTEP, "run", "-n", "2", "--hang-limit", "0.3", "--on-hang", "report"]
    with ThreadPoolExecutor(len(scripts)) as pool:  # most of it is waiting
        ended = list(pool.map(lambda name: run([*command, name], tmp_path), scripts))
    assert [(each.code, each.err) for each in ended] == [(0, "")] * 2
