"""Evaluators: a function of many designs, a function of one design, or an external program with a time limit.

A design that cannot be evaluated is recorded as a failure, and the search continues. Before each evaluation torch's,
numpy's and Python's global random generators are seeded with the design's key, so that a noisy evaluation can be
repeated.
"""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from lockstep.config.argument_checks import require_count, require_positive
from lockstep.errors import UserError
from lockstep.events.jsonl import parse_json
from lockstep.search.genome import Genome
from lockstep.search.problem import Evaluation
from lockstep.supervision import heartbeat
from lockstep.supervision.heartbeat import Phase
from lockstep.supervision.linux_processes import die_with_parent
from lockstep.world.keyed_random import seed_rngs

_MAX_REASON = 200  # characters
_MAX_OUTPUT_BYTES = 2**16  # read from the end of a program's output
_HEARTBEAT_EVERY_S = 1.0  # while a program runs; it has its own time limit


@dataclass(frozen=True)
class VectorizedEvaluator:
    """Evaluate many designs with one call of a function on tensors. A row with a NaN is a failure.

    Args:
        function: takes a float64 tensor with a row per design, and returns a tensor with a row of values per design.
        batch: rows per call. It is part of the numerics: a sum over more rows may be rounded differently.
    """

    function: Callable[[Tensor], Tensor]
    batch: int = 256

    def __post_init__(self) -> None:
        require_count("batch", self.batch)

    def evaluate(self, genome: Genome, designs: Tensor, keys: Sequence[int]) -> list[Evaluation]:
        """Implement `Evaluator.evaluate(genome, designs, keys)`."""
        try:
            return self._values(designs, keys)
        except Exception as error:
            if len(designs) == 1:
                return [failed_evaluation(error)]
            # One of the designs may have made the whole call fail: evaluate them one by one.
            return [
                evaluation
                for row, key in zip(designs, keys, strict=True)
                for evaluation in self.evaluate(genome, row[None], [key])
            ]

    def _values(self, designs: Tensor, keys: Sequence[int]) -> list[Evaluation]:
        seed_rngs(keys[0])
        values = self.function(designs.clone())
        if not isinstance(values, Tensor) or values.ndim not in (1, 2) or len(values) != len(designs):
            raise ValueError(f"expected a tensor with {len(designs)} rows of values, got {_kind(values)}")
        rows = values.detach().to("cpu", torch.float64).reshape(len(designs), -1)
        return [Evaluation(tuple(row)) for row in rows.tolist()]


@dataclass(frozen=True)
class ScalarEvaluator:
    """Evaluate one design per call of an ordinary function.

    Args:
        function: takes a design as a dictionary, and returns a number, a sequence of numbers, or numbers by name.
        names: the names of the values in the objectives' order, if the function returns them by name.
    """

    function: Callable[[dict[str, Any]], Any]
    names: tuple[str, ...] = ()

    batch: int = field(default=1, init=False)

    def evaluate(self, genome: Genome, designs: Tensor, keys: Sequence[int]) -> list[Evaluation]:
        """Implement `Evaluator.evaluate(genome, designs, keys)`."""
        return [self._evaluate(genome.design(row), key) for row, key in zip(designs, keys, strict=True)]

    def _evaluate(self, design: dict[str, Any], key: int) -> Evaluation:
        seed_rngs(key)
        try:
            return Evaluation(parse_values(self.function(design), self.names))
        except Exception as error:
            return failed_evaluation(error)


@dataclass(frozen=True)
class ProgramEvaluator:
    """Evaluate each design by running a program, which is killed with all its children after `time_limit_s`.

    The program reads one line of JSON, {"design": {gene: value …}, "seed": number}. The last line it prints is also
    JSON: a number, a list of numbers, or an object with the objectives by name.

    Args:
        command: the program and its arguments as separate words; no shell is involved.
        time_limit_s: how long one evaluation may take, in seconds.
        names: the names of the values in the objectives' order, if the program prints an object.
    """

    command: tuple[str, ...]
    time_limit_s: float
    names: tuple[str, ...] = ()

    batch: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        if isinstance(self.command, str) or not self.command:
            raise UserError(f"command={self.command!r}: expected separate words, as in ('python', 'evaluate.py')")
        object.__setattr__(self, "command", tuple(self.command))
        require_positive("time_limit_s", self.time_limit_s)

    def evaluate(self, genome: Genome, designs: Tensor, keys: Sequence[int]) -> list[Evaluation]:
        """Implement `Evaluator.evaluate(genome, designs, keys)`."""
        return [self._evaluate(genome.design(row), key) for row, key in zip(designs, keys, strict=True)]

    def _evaluate(self, design: dict[str, Any], key: int) -> Evaluation:
        try:
            with tempfile.TemporaryFile() as task, tempfile.TemporaryFile() as output:
                task.write(json.dumps({"design": design, "seed": key}).encode() + b"\n")
                task.seek(0)
                self._run(task, output)
                return Evaluation(parse_values(_last_line(output), self.names))
        except Exception as error:
            return failed_evaluation(error)

    def _run(self, task: IO[bytes], output: IO[bytes]) -> None:
        parent = os.getpid()
        process = subprocess.Popen(
            self.command,
            stdin=task,
            stdout=output,
            start_new_session=True,  # so that it can be killed with all its children
            preexec_fn=lambda: die_with_parent(parent),  # a killed rank must not leave it running
        )
        deadline = time.monotonic() + self.time_limit_s
        try:
            while process.poll() is None:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"over the time limit of {self.time_limit_s:g} s")
                heartbeat.enter(Phase.DESIGNS)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(min(left_s, _HEARTBEAT_EVERY_S))
        finally:
            _kill_session(process)
        if process.returncode != 0:
            raise RuntimeError(f"the program ended with exit code {process.returncode}")


def failed_evaluation(error: Exception) -> Evaluation:
    """Return a failure whose reason fits on one line of any terminal."""
    try:
        text = " ".join(str(error).split()).encode(errors="backslashreplace").decode()
    except Exception:  # a user's exception class may raise in __str__
        text = ""
    return Evaluation(failure=f"{type(error).__name__}: {text}"[:_MAX_REASON] if text else type(error).__name__)


def parse_values(answer: Any, names: Sequence[str]) -> tuple[float, ...]:
    """Convert what a function or program returned into the values of the objectives."""
    if isinstance(answer, Mapping):
        if not names:
            raise ValueError(
                "got values by name, but the evaluator has no names: pass names=, in the objectives' order"
            )
        if missing := [name for name in names if name not in answer]:
            raise ValueError(f"no value for {', '.join(missing)}")
        answer = [answer[name] for name in names]
    if isinstance(answer, Tensor | np.ndarray):
        answer = answer.tolist()
    values = answer if isinstance(answer, list | tuple) else [answer]
    if text := next((value for value in values if isinstance(value, str | bytes)), None):
        raise ValueError(f"expected numbers, got the text {text!r}")
    return tuple(float(value) for value in values)


def _kind(value: Any) -> str:
    return f"one of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _kill_session(process: "subprocess.Popen[bytes]") -> None:
    """Kill the program and everything it started, even if the program itself has already ended."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(output: IO[bytes]) -> Any:
    """Parse the last non-empty line of the output as JSON."""
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _MAX_OUTPUT_BYTES))
    lines = output.read().splitlines()
    last = next((line for line in reversed(lines) if line.strip()), None)
    if last is None:
        raise ValueError("the program printed nothing")
    try:
        return parse_json(last)
    except ValueError:
        raise ValueError(f"the program's last line is not JSON: {last[:60]!r}") from None
