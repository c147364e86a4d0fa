"""The checks after an attack see what they are there to see; and the processes that are ours."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.events.run_folder import RunFolder
from lockstep.observe.chaos.checks import (
    audit,
    check_end,
    check_evaluations,
    check_resumes,
    check_run,
    check_saved,
    check_steps,
)
from lockstep.observe.chaos.leftovers import Leftovers
from lockstep.observe.chaos.processes import Marked, open_listeners
from lockstep.train.run import Run
from lockstep.world.world import World
from tests.commands import wait_for


def line(step: int, **changed: str) -> dict[str, Any]:
    digests = {phase: f"{phase} of {step}" for phase in ("data", "loss", "gradient", "state")} | changed
    return {"step": step, "phases": {phase: {"x": digest} for phase, digest in digests.items()}}


def event(kind: str, step: int, **fields: Any) -> dict[str, Any]:
    return {"t": 0.0, "attempt": 1, "step": step, "kind": kind, **fields}


def run_folder(
    path: Path, trace: Sequence[dict[str, Any]], starts: Sequence[int], digest: str = "d", history: object = ()
) -> RunFolder:
    path.mkdir()
    run = RunFolder(path)
    events = [*(event("start", step) for step in starts), event("end", 5, digest=digest)]
    run.trace.write_text("".join(json.dumps(each) + "\n" for each in trace))
    run.events.write_text("".join(json.dumps(each) + "\n" for each in events))
    run.history.write_text(json.dumps(history))
    return run


@pytest.fixture
def reference(tmp_path: Path) -> RunFolder:
    return run_folder(tmp_path / "reference", [line(step) for step in range(1, 6)], [0])


@pytest.fixture
def attacked(tmp_path: Path) -> Callable[..., RunFolder]:
    def make(
        steps: Sequence[int] = (1, 2, 3, 2, 3, 4, 5), starts: Sequence[int] = (0, 0, 1, 3), **more: Any
    ) -> RunFolder:
        more.setdefault("trace", [line(step) for step in steps])
        return run_folder(tmp_path / "attacked", starts=starts, **more)

    return make


def test_a_run_that_lost_nothing_passes(reference: RunFolder, attacked: Callable[..., RunFolder]) -> None:
    assert all(check.is_passed for check in check_run(reference, attacked()))


def test_another_digest_at_the_end_is_seen(reference: RunFolder, attacked: Callable[..., RunFolder]) -> None:
    assert not check_end(reference, attacked(digest="e")).is_passed


def test_a_run_without_an_end_is_seen(reference: RunFolder, attacked: Callable[..., RunFolder]) -> None:
    run = attacked()
    run.events.write_text(json.dumps(event("start", 0)) + "\n")
    assert check_end(reference, run).faults == ("it says nothing of its end",)


@pytest.mark.parametrize("phase", ["data", "loss", "gradient", "state"])
def test_a_step_that_differs_is_seen_although_it_was_made_again(
    reference: RunFolder, attacked: Callable[..., RunFolder], phase: str
) -> None:
    trace = [line(1), line(2, **{phase: "other"}), line(2), line(3), line(4), line(5)]
    (fault,) = check_steps(reference, attacked(trace=trace)).faults
    assert fault == f"step 2: other {phase} than in the run left alone"


def test_steps_too_few_and_too_many_are_seen(reference: RunFolder, attacked: Callable[..., RunFolder]) -> None:
    faults = check_steps(reference, attacked(steps=[1, 2, 4, 5, 6])).faults
    assert faults == ("step 6: a step that the run left alone has not made", "step 3 was never made")


@pytest.mark.parametrize(
    ("steps", "starts", "fault"),
    [
        ((1, 2, 3, 3, 4, 5), (0, 1), "after step 3 came step 3, and no attempt has begun there"),
        ((1, 2, 4, 5), (0, 3), "after step 2 came step 4: the steps between are missing"),
        ((2, 3, 4, 5), (0,), "after step 0 came step 2, and no attempt has begun there"),
        ((1, 2, 1, 2, 3), (0, 1), "after step 2 came step 1, and no attempt has begun there"),
    ],
)
def test_an_attempt_that_did_not_go_on_where_its_state_was_is_seen(
    attacked: Callable[..., RunFolder], steps: Sequence[int], starts: Sequence[int], fault: str
) -> None:
    assert check_resumes(attacked(steps=steps, starts=starts)).faults == (fault,)


def test_an_evaluation_that_was_lost_is_seen(reference: RunFolder, attacked: Callable[..., RunFolder]) -> None:
    assert not check_evaluations(reference, attacked(history=[{"step": 5}])).is_passed


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that was really made: two epochs of three steps."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)

    folder = tmp_path_factory.mktemp("saved") / "run"
    run = Run(folder, World(), seed=1, sinks=[])
    model = run.prepare(nn.Linear(4, 3))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    samples = TensorDataset(torch.ones(48, 4), torch.arange(48) % 3)
    for step in run.steps(run.loader(samples, 16, lanes=4), epochs=2, save_every=2, keep=1):
        step.accumulate(loss, model)
        step.update(optimizer)
    run.finish()
    return RunFolder(folder)


def test_samples_that_no_commit_has_used_are_seen(saved: RunFolder) -> None:
    text = saved.ledger.read_text()
    first, *_ = text.splitlines()
    try:
        saved.ledger.write_text(text.replace(json.dumps(json.loads(first)["spans"]), "[]"))
        faults = audit(saved, {}).faults
    finally:
        saved.ledger.write_text(text)
    assert "begins with batch 2: batches 0 to 1 are missing" in faults[-1]


def test_an_audit_that_could_not_be_made_is_not_passed(monkeypatch: pytest.MonkeyPatch, saved: RunFolder) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")  # ends without a word
    assert audit(saved, {}).faults == ("it ended with exit code 1",)


def test_another_state_on_the_disk_than_at_the_end_is_seen(saved: RunFolder, reference: RunFolder) -> None:
    (fault,) = check_saved(reference, saved, {}).faults
    assert fault.startswith("expected d, found ")


SLEEPER = """
import os, signal, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())  # which does not listen
child = os.fork()
if child == 0:
    signal.pause()
print(child, flush=True)
signal.pause()
"""


@pytest.fixture
def family() -> Iterator[tuple[Marked, int, int]]:
    marked = Marked("LOCKSTEP_TEST_MARK", f"of {os.getpid()}")
    command = [sys.executable, "-c", SLEEPER]
    with subprocess.Popen(command, env={**os.environ, **marked.variables}, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            yield marked, parent.pid, child
        finally:
            for pid in (child, parent.pid):
                marked.send(pid, signal.SIGKILL)
            parent.kill()


def test_marked_processes_are_found_with_what_they_start(family: tuple[Marked, int, int]) -> None:
    marked, parent, child = family
    assert {(process.pid, process.parent) for process in marked.find()} == {(parent, os.getpid()), (child, parent)}
    assert Marked("LOCKSTEP_TEST_MARK", "another").find() == []


def test_a_dead_process_does_not_count_although_nobody_has_buried_it(family: tuple[Marked, int, int]) -> None:
    marked, parent, child = family
    assert marked.send(child, signal.SIGKILL)
    wait_for(lambda: [process.pid for process in marked.find()] == [parent], 10, "the child is dead")
    assert not marked.send(child, signal.SIGKILL)
    assert Path(f"/proc/{child}").exists(), "it is a zombie"


def test_a_stranger_is_not_signalled(family: tuple[Marked, int, int]) -> None:
    assert not Marked("LOCKSTEP_TEST_MARK", "another").send(family[1], signal.SIGKILL)
    assert family[0].is_one(family[1])


def test_sockets_that_listen_are_seen_and_seen_to_be_gone(family: tuple[Marked, int, int]) -> None:
    marked, parent, child = family
    with socket.create_server(("127.0.0.1", 0)):  # of a stranger
        listening = marked.listening()
    assert len(listening) == 1
    assert listening <= open_listeners()
    for pid in (child, parent):
        marked.send(pid, signal.SIGKILL)
    wait_for(lambda: not listening & open_listeners(), 10, "they are closed")


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    return folder


def test_where_nothing_is_left_nothing_is_told(memory: Path) -> None:
    leftovers = Leftovers(Marked("LOCKSTEP_TEST_MARK", "of nobody"), memory)
    leftovers.note_listeners()
    leftovers.await_processes("was killed", farewell_s=0)
    leftovers.look_into_memory()
    assert leftovers.check().is_passed


def test_a_process_that_is_left_is_told_once_and_killed(family: tuple[Marked, int, int], memory: Path) -> None:
    marked, parent, child = family
    leftovers = Leftovers(marked, memory)
    leftovers.await_processes("was killed", farewell_s=0.1)
    faults = leftovers.check().faults
    assert len(faults) == 2
    for pid in (parent, child):
        assert any(f"0.1 s after its launcher was killed there was still Process(pid={pid}," in each for each in faults)
    assert not marked.find()
    assert leftovers.check().is_passed


# Its child, which carries no mark, goes on listening.
LEAVES_A_LISTENER = """
import socket, subprocess, sys
listener = socket.create_server(("127.0.0.1", 0))
sleeper = [sys.executable, "-c", "import sys; sys.stdin.read()"]
subprocess.Popen(sleeper, env={}, pass_fds=[listener.fileno()])
print("listens", flush=True)
sys.stdin.read(1)
"""


def test_a_port_that_is_left_by_whomever_is_told(memory: Path) -> None:
    marked = Marked("LOCKSTEP_TEST_MARK", f"of {os.getpid()}")
    leftovers = Leftovers(marked, memory)
    command, pipe = [sys.executable, "-c", LEAVES_A_LISTENER], subprocess.PIPE
    with subprocess.Popen(command, env={**os.environ, **marked.variables}, stdin=pipe, stdout=pipe) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"listens\n"
        leftovers.note_listeners()
        parent.kill()
        leftovers.await_processes("was killed", farewell_s=10)
        assert leftovers.check().faults == ("1 of the sockets that listened still do",)
    wait_for(lambda: leftovers.check().is_passed, 10, "the child has ended too")


def test_shared_memory_that_is_left_is_told(memory: Path) -> None:
    leftovers = Leftovers(Marked("LOCKSTEP_TEST_MARK", "of nobody"), memory)
    (memory / "lockstep-agent-x").mkdir()
    leftovers.look_into_memory()
    assert leftovers.check().faults == ("shared memory: lockstep-agent-x",)
