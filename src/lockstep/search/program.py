"""Evaluating each design by a program of its own, with a time limit: for slow simulations that others have written."""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

from torch import Tensor

from lockstep.config.arguments import require_positive
from lockstep.config.json_text import parse_json
from lockstep.errors import UserError
from lockstep.launcher.kinship import die_with_parent
from lockstep.search.evaluators import failed, numbers_in
from lockstep.search.genome import Genome
from lockstep.search.problem import Evaluation
from lockstep.supervision import pulse
from lockstep.supervision.pulse import Phase

_MAX_OUTPUT_BYTES = 2**16  # from the end
_SIGN_OF_LIFE_S = 1.0  # how often, while it runs: it has its own limit


@dataclass(frozen=True)
class Program:
    """A program for each design, ended with all it has started when it takes longer than `time_limit_s`.

    It reads one line of JSON, {"design": {gene: value …}, "seed": number}, and its last line of output is JSON too: a
    number, a list of them, or an object with the objectives by name.
    """

    command: tuple[str, ...]
    time_limit_s: float
    names: tuple[str, ...] = ()

    batch: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        if isinstance(self.command, str) or not self.command:
            raise UserError(f"command={self.command!r}: expected its words apart, as in ('python', 'evaluate.py')")
        object.__setattr__(self, "command", tuple(self.command))
        require_positive("time_limit_s", self.time_limit_s)

    def evaluate(self, genome: Genome, designs: Tensor, keys: Sequence[int]) -> list[Evaluation]:
        return [self._evaluate(genome.design(row), key) for row, key in zip(designs, keys, strict=True)]

    def _evaluate(self, design: dict[str, Any], key: int) -> Evaluation:
        try:
            with tempfile.TemporaryFile() as task, tempfile.TemporaryFile() as output:
                task.write(json.dumps({"design": design, "seed": key}).encode() + b"\n")
                task.seek(0)
                self._run(task, output)
                return Evaluation(numbers_in(_last_line(output), self.names))
        except Exception as error:
            return failed(error)

    def _run(self, task: IO[bytes], output: IO[bytes]) -> None:
        parent = os.getpid()
        process = subprocess.Popen(
            self.command,
            stdin=task,
            stdout=output,
            start_new_session=True,  # so that it can be ended with all it has started
            preexec_fn=lambda: die_with_parent(parent),  # a killed rank must leave none behind
        )
        deadline = time.monotonic() + self.time_limit_s
        try:
            while process.poll() is None:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"over the time limit of {self.time_limit_s:g} s")
                pulse.enter(Phase.DESIGNS)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(min(left_s, _SIGN_OF_LIFE_S))
        finally:
            _end(process)
        if process.returncode != 0:
            raise RuntimeError(f"the program ended with exit code {process.returncode}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """With all it has started, also where it has ended itself."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(output: IO[bytes]) -> Any:
    """Of what it has printed, as JSON."""
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _MAX_OUTPUT_BYTES))
    lines = output.read().splitlines()
    last = next((line for line in reversed(lines) if line.strip()), None)
    if last is None:
        raise ValueError("the program has printed nothing")
    try:
        return parse_json(last)
    except ValueError:
        raise ValueError(f"the program's last line is not JSON: {last[:60]!r}") from None
