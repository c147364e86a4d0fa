"""A hang is explained: the right rank, phase and line, and which ranks wait for it.

Each case hangs in a real job, at a line that is marked with the case's name. A hang that is certain ends the job at the
hang limit, while the stop limit is half an hour; one that may be a pause ends it at the stop limit, which is as short
as the hang limit in these cases. The limit is short for all of them, and limits grow with what a run has needed, so a
busy machine delays verdicts but does not make them wrong. Healthy pauses are in `test_pauses.py`.
"""

import json
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.commands import LOCKSTEP, run, started

LIMIT_S = 0.5
AT_A_TIME = 3  # launches
REPORTED_AGAIN_S = 3.5  # in which a hang is probed again

# Shared by both kinds of scripts: ways to hang in step 4, on the given rank.
WAYS = """
import atexit, ctypes, os, signal, sys, threading, time
import torch, torch.distributed as dist

CASE, CULPRIT = sys.argv[1], int(sys.argv[2])
RANK = int(os.environ["RANK"])
torch.set_num_threads(1)

def is_culprit(case):
    return CASE == case and RANK == CULPRIT

def hang():
    if is_culprit("code"):
        time.sleep(1000)  # at: code
    if is_culprit("lock"):
        mutex = ctypes.create_string_buffer(64)
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)  # at: lock
    if is_culprit("stop"):
        os.kill(os.getpid(), signal.SIGSTOP)  # at: stop
    if is_culprit("file"):
        os.mkfifo(f"pipe-{RANK}")
        pipe = os.open(f"pipe-{RANK}", os.O_RDWR)
        os.read(pipe, 1)  # at: file
    if is_culprit("pipe"):
        os.read(os.pipe()[0], 1)  # at: pipe
    if is_culprit("kernel"):
        os.mkfifo(f"pipe-{RANK}")
        action = (os.POSIX_SPAWN_OPEN, 9, f"pipe-{RANK}", os.O_RDONLY, 0)
        os.posix_spawn("/bin/true", ["true"], {}, file_actions=[action])
    if is_culprit("exit"):
        atexit.register(time.sleep, 1000)  # its connections stay open, so the others do not notice
        sys.exit()

def meet(number):
    x = torch.ones(3)
    if number == 4 and is_culprit("different"):
        dist.broadcast(x, src=0)  # at: different
    if not (number == 4 and is_culprit("skip")):
        dist.all_reduce(x)  # others at: different skip
    dist.barrier()  # at: skip

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        global num_read
        num_read += 1
        if num_read == 11 and RANK == CULPRIT and CASE in ("data", "worker", "stopped worker", "dead worker"):
            with open("sample", "a") as file:
                print(index, os.getpid(), file=file)
            if CASE == "stopped worker":
                os.kill(os.getpid(), signal.SIGSTOP)
            if CASE == "dead worker":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)  # at: data worker
        return torch.ones(4), index

num_read = 0
WORKERS = 2 if "worker" in CASE else 0
"""

PLAIN = f"""{WAYS}
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=WORKERS)
for number, (x, _) in enumerate(loader, 1):  # at: stopped_worker
    if number == 4:
        hang()
    model(x).sum().backward()  # others at: code lock stop file pipe kernel exit data worker stopped_worker
    optimizer.step()
    meet(number)
"""

LOOP = f"""{WAYS}
import lockstep

def loss(model, batch):
    x, index = batch
    return model(x).sum(), len(x)

def main(world):
    run = lockstep.Run("run", world, seed=1)
    model = run.prepare(torch.nn.Linear(4, 1))
    optimizer = run.optimizer(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    train = run.loader(Data(), global_batch=8, lanes=4, workers=WORKERS)
    for step in run.steps(train, epochs=8):  # at: stopped_worker
        if step.number == 4:
            hang()
        meet(step.number)
        step.accumulate(loss, model)
        step.update(optimizer)

lockstep.launch(main, device="cpu")
"""


class Outcome(NamedTuple):
    code: int
    err: str
    facts: dict[str, Any]  # the JSON report
    samples: dict[int, int]  # that hung, by the process that read them


def hung(folder: Path, text: str, case: str, culprit: int, num_ranks: int, *options: str) -> Outcome:
    (folder / "script.py").write_text(text)
    command = [*LOCKSTEP, "run", "-n", str(num_ranks), "--hang-limit", str(LIMIT_S), "--incidents", "incidents"]
    finished = run([*command, *options, "script.py", case, str(culprit)], folder)
    reports = sorted(folder.glob("**/incidents/*.json"))
    # Where steps are slow, on a busy machine, a hang that may be none is reported some time before it ends the job.
    is_only = len(reports) == 1 or (reports and "The job ends only after" in finished.err)
    assert is_only, finished.err
    lines = (folder / "sample").read_text().splitlines() if (folder / "sample").exists() else []
    samples = {int(pid): int(index) for index, pid in map(str.split, lines)}
    return Outcome(finished.code, finished.err, json.loads(reports[-1].read_text()), samples)


def marked(text: str, mark: str, case: str) -> int:
    """Return the number of the line that is marked with the case's name."""
    pattern = re.compile(rf"# {mark}:(?: \w+)* {case.replace(' ', '_')}\b")
    (line,) = [number for number, line in enumerate(text.splitlines(), 1) if pattern.search(line)]
    return line


class Expected(NamedTuple):
    kind: str
    phase: str  # of a loop's rank
    words: str  # in the paragraph
    is_certain: bool = False
    has_line: bool = True


CASES = {
    "skip": Expected("mismatch", "computing", "rank {culprit} skipped the all_reduce of [[3]]", is_certain=True),
    "different": Expected("mismatch", "computing", "the other ranks call", is_certain=True),
    "code": Expected("idle", "computing", "it waits or sleeps at script.py:{line} in hang"),
    "lock": Expected("native call", "computing", "that holds the interpreter lock, at script.py:{line} in hang"),
    "stop": Expected("stopped", "computing", "it is stopped (SIGSTOP, pid ", is_certain=True),
    "pipe": Expected(
        "pipe without a writer", "computing", "reads a pipe that no other process can write to", is_certain=True
    ),
    "file": Expected(
        "blocked file", "computing", "blocked in the read of {folder}/pipe-{culprit}, at script.py:{line}"
    ),
    "kernel": Expected("blocked in the kernel", "computing", "is blocked in the kernel", has_line=False),
    "exit": Expected("early exit", "leaving", "has finished its script", is_certain=True, has_line=False),
    "data": Expected("data", "data", "script.py:{line} in __getitem__"),
    "worker": Expected("data", "data", "(pid {pid}), which makes no progress"),
    "stopped worker": Expected("data", "data", "(pid {pid}), which is stopped (SIGSTOP)", is_certain=True),
}


def check(folder: Path, text: str, case: str, culprit: int, num_ranks: int) -> None:
    expected = CASES[case]
    options = [] if expected.is_certain else ["--hang-stop", str(LIMIT_S)]
    outcome = hung(folder, text, case, culprit, num_ranks, "--on-hang", "stop", *options)
    assert 0 <= outcome.facts["overdue_s"] <= 5, "reported within five seconds after the limit"
    is_loop = text is LOOP
    line = marked(text, "at", case) if expected.has_line else None
    assert outcome.code == 5, outcome.err
    lines = outcome.err.splitlines()
    first = lines[0] if expected.is_certain else next(each for each in lines if "The job ends, after more than" in each)
    assert "The job ends" not in first or not expected.is_certain, first
    pid = outcome.facts.get("worker_pid")
    assert expected.words.format(culprit=culprit, line=line, folder=folder, pid=pid) in first
    assert (outcome.facts["rank"], outcome.facts["hang"], outcome.facts["line"]) == (culprit, expected.kind, line), (
        first
    )
    if is_loop or expected.phase == "leaving":
        assert outcome.facts["phase"] == expected.phase, first
    if case == "stop":
        assert f"), at script.py:{line} in hang" in first
    if "worker" in case:
        assert pid in outcome.samples, first
    if is_loop and outcome.samples:
        sample = outcome.samples[pid] if "worker" in case else next(iter(outcome.samples.values()))
        assert outcome.facts["sample"] == sample, first
        assert f"sample {sample}" in first
    others = [rank for rank in range(num_ranks) if rank != culprit]
    assert outcome.facts["victims"] == others, first
    place = f"script.py:{marked(text, 'others at', 'skip' if is_loop else case)}"
    assert all(place in outcome.facts["waiting"][str(rank)] for rank in others), first
    assert place in first


def check_all(folder: Path, trials: Sequence[tuple[str, str, int, int]]) -> None:
    """Check several trials at a time: most of a hang is waiting."""
    folders = [folder / str(number) for number in range(len(trials))]
    for each in folders:
        each.mkdir()
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        checks = [pool.submit(check, each, *trial) for each, trial in zip(folders, trials, strict=True)]
    failed = {trial[1:]: found for trial, each in zip(trials, checks, strict=True) if (found := each.exception())}
    assert not failed, failed


def test_the_culprit_of_a_plain_script_is_named(tmp_path: Path) -> None:
    check_all(tmp_path, [(PLAIN, case, 1, 2) for case in CASES])


def test_the_culprit_of_a_loop_is_named(tmp_path: Path) -> None:
    check_all(tmp_path, [(LOOP, case, 0, 2) for case in ("skip", "code", "data", "worker")])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_whole_matrix(tmp_path: Path, case: str) -> None:
    """Each rank of three is the culprit once, in each kind of script; jobs of two ranks are tested above."""
    texts = [PLAIN] if case == "exit" else [PLAIN, LOOP]  # see `test_a_loop_s_rank_that_exits_early_is_named`
    check_all(tmp_path, [(text, case, culprit, 3) for text in texts for culprit in range(3)])


def test_a_loop_s_rank_that_exits_early_is_named(tmp_path: Path) -> None:
    """Its run saves itself as the script leaves it, and waits for the other ranks to save too: they never do."""
    outcome = hung(tmp_path, LOOP, "exit", 1, 3, "--on-hang", "stop")
    assert (outcome.code, outcome.facts["kind"], outcome.facts["rank"]) == (5, "hang", 1)
    assert "rank 1 waits in step 4 (forward and backward pass) in the save of all ranks" in outcome.err
    assert "rank 1 called all_gather of [[1]], which the other ranks do not" in outcome.err


@pytest.mark.slow
def test_a_killed_data_worker_of_a_plain_script_is_named(tmp_path: Path) -> None:
    """Torch raises in the rank: a crash, not a hang."""
    outcome = hung(tmp_path, PLAIN, "dead worker", 1, 2)
    assert outcome.code == 3
    assert outcome.facts["rank"] == 1
    expected = r"DataLoader worker \(pid\S* \d+\)|\(to a data worker, which may have died\)"  # it depends on the moment
    assert re.search(expected, outcome.err.splitlines()[0]), outcome.err


@pytest.mark.slow
def test_a_rank_that_raised_but_does_not_exit_is_a_crash_not_a_hang(tmp_path: Path) -> None:
    outcome = hung(tmp_path, PLAIN.replace("sys.exit()", "raise ValueError('planted')"), "exit", 1, 2)
    assert (outcome.code, outcome.facts["rank"]) == (3, 1)
    assert "the cause: ValueError: planted" in outcome.err.splitlines()[0]


def test_a_hang_is_restarted_once_and_not_again_in_the_same_place(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LOOP)
    command = [*LOCKSTEP, "run", "-n", "2", "--hang-limit", str(LIMIT_S), "--max-restarts", "3", "script.py"]
    finished = run([*command, "pipe", "1"], tmp_path, timeout_s=180)
    assert finished.code == 5, finished.err
    assert finished.err.count("has been stuck in step 4") == 2
    assert "restarting all ranks" in finished.err
    assert "no restart: it failed after step 3 in the same way as before" in finished.err


@pytest.mark.slow
def test_a_hang_can_be_reported_only_and_only_once(tmp_path: Path) -> None:
    """The job continues when it gets what it waited for."""
    (tmp_path / "script.py").write_text(PLAIN)
    command = [*LOCKSTEP, "run", "-n", "2", "--hang-limit", "2", "--hang-stop", "2", "--on-hang", "report", "script.py"]
    with started([*command, "file", "1"], tmp_path) as job:
        assert job.stderr is not None
        assert "rank 1 of 2" in job.stderr.readline()
        time.sleep(REPORTED_AGAIN_S)
        (tmp_path / "pipe-1").write_text("x")
        _, err = job.communicate(timeout=60)
    assert (job.returncode, err) == (0, "")
