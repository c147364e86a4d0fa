"""Evaluating by a program: what it is given, what it may answer, and how it is ended."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.errors import UserError
from lockstep.search.genome import ChoiceGene, FloatGene, Genome, IntegerGene
from lockstep.search.problem import Evaluation
from lockstep.search.program import Program
from tests.commands import is_running, wait_for

GENOME = Genome([FloatGene("x", 0.0, 1.0), IntegerGene("n", 0, 9), ChoiceGene("kind", ("plain", "fancy"))])
DESIGNS = torch.tensor([[0.1, 7.0, 1.0]], dtype=torch.float64)


def shell(script: str, *, time_limit_s: float = 60.0, names: Sequence[str] = ()) -> Program:
    return Program(("/bin/sh", "-c", script), time_limit_s, tuple(names))


def evaluate(program: Program) -> Evaluation:
    (evaluation,) = program.evaluate(GENOME, DESIGNS, [42])
    return evaluation


def test_a_program_reads_design_and_seed_and_answers_with_its_last_line(tmp_path: Path) -> None:
    script = tmp_path / "evaluate.py"
    script.write_text(
        "import json, sys\n"
        "task = json.loads(sys.stdin.readline())\n"
        "assert sys.stdin.read() == ''\n"
        "print('simulating', json.dumps(task))\n"
        "print(json.dumps({'lift': task['design']['n'], 'drag': task['design']['x'], 'seed': task['seed']}))\n"
    )
    program = Program((sys.executable, str(script)), time_limit_s=60.0, names=("drag", "lift", "seed"))
    assert evaluate(program) == Evaluation((0.1, 7.0, 42.0))


def test_genes_arrive_as_what_they_are(tmp_path: Path) -> None:
    evaluate(shell(f"cat > {tmp_path}/task"))
    assert json.loads((tmp_path / "task").read_text()) == {"design": {"x": 0.1, "n": 7, "kind": "fancy"}, "seed": 42}


@pytest.mark.parametrize(
    ("output", "values"),
    [("3", (3.0,)), ("[1, 2.5]", (1.0, 2.5)), ("noise\\n0.125\\n\\n  \\n", (0.125,)), ("0.5", (0.5,))],
)
def test_it_may_answer_a_number_or_a_list(output: str, values: tuple[float, ...]) -> None:
    assert evaluate(shell(f"printf '{output}'")) == Evaluation(values)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 3", "RuntimeError: the program ended with exit code 3"),
        ("echo 1.0; exit 1", "RuntimeError: the program ended with exit code 1"),
        ("kill -9 $$", "RuntimeError: the program ended with exit code -9"),
        ("true", "ValueError: the program has printed nothing"),
        ("printf '\\n \\n'", "ValueError: the program has printed nothing"),
        ("echo 1.0; echo done", "ValueError: the program's last line is not JSON: b'done'"),
        ("printf '\\377\\376'", "ValueError: the program's last line is not JSON: b'\\xff\\xfe'"),
        ("""echo '{"lift": 1}'""", "ValueError: no value for drag"),
        ("echo null", "TypeError: "),
        ("echo '[[1]]'", "TypeError: "),
    ],
)
def test_what_goes_wrong_is_the_reason_of_a_failure(script: str, reason: str) -> None:
    evaluation = evaluate(shell(script, names=["drag", "lift"]))
    assert evaluation.values == ()
    assert evaluation.failure is not None
    assert evaluation.failure.startswith(reason)


def test_a_program_that_is_not_there_is_a_failure() -> None:
    failure = evaluate(Program(("/no/such/program",), 1.0)).failure
    assert failure is not None
    assert failure.startswith("FileNotFoundError: ")


def test_over_its_time_limit_it_ends_with_all_it_has_started(tmp_path: Path) -> None:
    script = f"sleep 600 & echo $$ $! > {tmp_path}/pids; echo 1.0; wait"
    assert evaluate(shell(script, time_limit_s=0.5)) == Evaluation(failure="TimeoutError: over the time limit of 0.5 s")
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    for pid in pids:
        wait_for(lambda pid=pid: not is_running(pid), 10, f"process {pid} is to end")  # type: ignore[misc]


def test_what_it_leaves_running_is_ended_too_and_nobody_waits_for_it(tmp_path: Path) -> None:
    # The one left behind holds the output open, as a pipe's reader would notice.
    assert evaluate(shell(f"sleep 600 & echo $! > {tmp_path}/pid; echo 1.0")) == Evaluation((1.0,))
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not is_running(pid), 10, f"process {pid} is to end")


def test_of_much_output_the_end_counts() -> None:
    assert evaluate(shell("head -c 3000000 /dev/zero | tr '\\0' 'x'; echo; echo 2.0")) == Evaluation((2.0,))


def test_a_last_line_that_is_too_long_is_no_answer() -> None:
    evaluation = evaluate(shell("""printf '['; head -c 70000 /dev/zero | tr '\\0' ' '; printf '1.0]'"""))
    assert evaluation.failure is not None
    assert evaluation.failure.startswith("ValueError: the program's last line is not JSON: b' ")
    assert evaluate(shell("printf '['; head -c 60000 /dev/zero | tr '\\0' ' '; printf '1.0]'")) == Evaluation((1.0,))


def test_each_design_has_a_program_of_its_own() -> None:
    designs = torch.tensor([[0.25, 1.0, 0.0], [0.5, 2.0, 0.0]], dtype=torch.float64)
    first, second = shell('read task; echo "[$$, ${#task}]"').evaluate(GENOME, designs, [1, 2])
    assert first.values[0] != second.values[0]


@pytest.mark.parametrize("command", ["python evaluate.py", "", ()])
def test_a_command_is_words(command: Any) -> None:
    with pytest.raises(UserError, match=r"command=.*: expected its words apart, as in \('python', 'evaluate.py'\)"):
        Program(command, 1.0)


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), True, "10"])
def test_a_time_limit_is_a_number_above_0(limit: Any) -> None:
    with pytest.raises(UserError, match=r"time_limit_s=.*: expected a number greater than 0"):
        Program(("true",), limit)
