"""The program that each process of `lockstep bench` runs; its only argument is the `BenchTask`, as JSON.

Every loop is timed once per round, in turn, so that a noisy machine disturbs all of them alike. In the first round,
which is not timed, each loop is built and makes its first steps; its weights are then saved, to be compared with those
from another number of processes.
"""

import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from lockstep.bench.bench_models import Workload, build_workload
from lockstep.bench.bench_record import BenchFailure, BenchRecord, BenchTask, BenchTimes
from lockstep.bench.contender_loops import LOOPS, BenchLoop, LoopSetup
from lockstep.bench.contenders import Contender
from lockstep.supervision import heartbeat
from lockstep.supervision.heartbeat import Phase
from lockstep.terminal_text import print_line
from lockstep.world.collectives import barrier
from lockstep.world.determinism import set_determinism_flags
from lockstep.world.process_group import leave_on_exit, setup_distributed
from lockstep.world.script_process import choose_threads
from lockstep.world.world import World

_BATCHES_PER_EPOCH = 32
_DROPOUT = 0.1  # random numbers must not depend on the number of processes either


class BenchRank:
    """Times all contenders on this rank; all ranks do the same."""

    def __init__(self, task: BenchTask, world: World, report: Callable[[str], None]) -> None:
        """`report` is called with a line of progress."""
        self._task = task
        self._world = world
        self._report = report
        self._record = BenchRecord(Path(task.folder))
        work = build_workload(task.model, task.batch * _BATCHES_PER_EPOCH, _DROPOUT)
        self._work = _on_device(work, world.device)
        self._loops: dict[str, BenchLoop] = {}
        self._seconds: dict[str, list[float]] = {contender.name: [] for contender in task.contenders}

    def measure(self) -> None:
        """Run all rounds and write the results into the task's folder."""
        contenders = self._task.contenders
        self._report(f"first steps of {len(contenders)} loops")
        for contender in contenders:
            self._take_turn(contender, self._begin)
        for number in range(self._task.rounds):
            self._report(f"round {number + 1} of {self._task.rounds}")
            first = number % len(contenders)  # rotated, so that no loop always follows the same one
            for contender in contenders[first:] + contenders[:first]:
                self._take_turn(contender, self._time)
        if self._world.is_main:
            self._record.end_turns()
        for loop in self._loops.values():
            loop.close()
        if self._world.is_main:
            num_parameters = sum(parameter.numel() for parameter in self._work.make_model().parameters())
            self._record.write_times(BenchTimes(num_parameters, self._seconds))

    def _take_turn(self, contender: Contender, action: Callable[[Contender], None]) -> None:
        heartbeat.enter(Phase.SCRIPT)  # the previous loop may have left another phase
        if self._world.is_main:
            self._record.begin_turn(contender.name)
        try:
            action(contender)
        except Exception as error:
            lines = str(error).strip().splitlines()
            reason = f"{type(error).__name__}: {lines[0] if lines else ''}"
            self._record.write_failure(BenchFailure(contender.name, reason))
            raise

    def _begin(self, contender: Contender) -> None:
        # On a GPU, a lockstep run chooses its kernels when it is created; the other loops take the fastest ones.
        set_determinism_flags(self._world.device, tf32=False, deterministic=False)
        loop = LOOPS[contender.loop](LoopSetup(self._work, self._world, self._task.batch, contender.lanes))
        loop.advance(self._task.steps)
        barrier()  # otherwise a rank that lost contact would blame the next loop
        self._loops[contender.name] = loop
        if self._world.is_main:
            self._record.write_weights(contender.name, loop.weights())

    def _time(self, contender: Contender) -> None:
        loop = self._loops[contender.name]
        set_determinism_flags(self._world.device, tf32=False, deterministic=loop.is_deterministic)
        start = self._synchronized_time()
        loop.advance(self._task.steps)
        self._seconds[contender.name].append((self._synchronized_time() - start) / self._task.steps)

    def _synchronized_time(self) -> float:
        """Return the time once all ranks and the device have reached this point."""
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        barrier()
        return time.perf_counter()


def _on_device(work: Workload, device: torch.device) -> Workload:
    return work._replace(data=TensorDataset(*(tensor.to(device) for tensor in work.data.tensors)))


def main() -> None:
    task, terminal = BenchTask.from_json(sys.argv[1]), sys.stdout
    choose_threads(1)
    with redirect_stdout(sys.stderr), leave_on_exit():  # keep what libraries print off the terminal
        world = setup_distributed(device=task.device)
        processes = "one process" if world.size == 1 else f"{world.size} processes"

        def report(line: str) -> None:
            if world.is_main:
                print_line(f"{processes}: {line}", file=terminal, flush=True)

        BenchRank(task, world, report).measure()


if __name__ == "__main__":
    main()
