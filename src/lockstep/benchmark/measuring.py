"""Measuring: every loop once a round, in turn, so that a noisy machine disturbs all of them alike.

In the first round, which is not timed, each loop is made and takes its first steps; then its weights are kept, to be
compared with those from another number of processes.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from lockstep.benchmark.catalogue import Entry
from lockstep.benchmark.loop import Loop, Setting
from lockstep.benchmark.loops import LOOPS
from lockstep.benchmark.record import Failure, Record, Times
from lockstep.benchmark.task import Task
from lockstep.benchmark.workloads import Workload, workload
from lockstep.supervision import pulse
from lockstep.supervision.pulse import Phase
from lockstep.world.arithmetic import set_arithmetic
from lockstep.world.collectives import barrier
from lockstep.world.world import World

_BATCHES = 32  # of an epoch


class Measuring:
    """On this rank; all ranks do the same."""

    def __init__(self, task: Task, world: World, tell: Callable[[str], None]) -> None:
        self._task = task
        self._world = world
        self._tell = tell
        self._record = Record(Path(task.folder))
        self._work = _on_device(workload(task.model, task.batch * _BATCHES), world.device)
        self._loops: dict[str, Loop] = {}
        self._seconds: dict[str, list[float]] = {entry.name: [] for entry in task.entries}

    def measure(self) -> None:
        self._tell(f"first steps of {len(self._task.entries)} loops")
        for entry in self._task.entries:
            self._turn(entry, self._begin)
        for number in range(self._task.rounds):
            self._tell(f"round {number + 1} of {self._task.rounds}")
            first = number % len(self._task.entries)  # nobody is always the one after somebody else
            for entry in self._task.entries[first:] + self._task.entries[:first]:
                self._turn(entry, self._time)
        if self._world.is_main:
            self._record.end_turns()
        for loop in self._loops.values():
            loop.close()
        if self._world.is_main:
            num_parameters = sum(parameter.numel() for parameter in self._work.make_model().parameters())
            self._record.keep_times(Times(num_parameters, self._seconds))

    def _turn(self, entry: Entry, do: Callable[[Entry], None]) -> None:
        pulse.enter(Phase.SCRIPT)  # what the loop before has said of itself is over
        if self._world.is_main:
            self._record.begin_turn(entry.name)
        try:
            do(entry)
        except Exception as error:
            words = str(error).strip().splitlines()
            self._record.note_failure(Failure(entry.name, f"{type(error).__name__}: {words[0] if words else ''}"))
            raise

    def _begin(self, entry: Entry) -> None:
        # On a GPU a run chooses its kernels when it is made; the others take what is fastest.
        set_arithmetic(self._world.device, tf32=False, deterministic=False)
        loop = LOOPS[entry.loop](Setting(self._work, self._world, self._task.batch, entry.lanes))
        loop.advance(self._task.steps)
        barrier()  # a rank that lost another would blame the next loop
        self._loops[entry.name] = loop
        if self._world.is_main:
            self._record.keep_weights(entry.name, loop.weights())

    def _time(self, entry: Entry) -> None:
        loop = self._loops[entry.name]
        set_arithmetic(self._world.device, tf32=False, deterministic=loop.is_exact)
        began = self._now()
        loop.advance(self._task.steps)
        self._seconds[entry.name].append((self._now() - began) / self._task.steps)

    def _now(self) -> float:
        """When all ranks have come so far."""
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        barrier()
        return time.perf_counter()


def _on_device(work: Workload, device: torch.device) -> Workload:
    return work._replace(data=TensorDataset(*(tensor.to(device) for tensor in work.data.tensors)))
