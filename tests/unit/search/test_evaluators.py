"""Evaluating by a function or a program: results, random numbers, and failures of single designs."""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.search.evaluators import ProgramEvaluator, ScalarEvaluator, VectorizedEvaluator
from lockstep.search.genome import ChoiceGene, FloatGene, Genome, IntegerGene
from lockstep.search.problem import Evaluation
from tests.commands import is_running, wait_for

GENOME = Genome([FloatGene("x", -10.0, 10.0), IntegerGene("n", 0, 9), ChoiceGene("kind", ("plain", "fancy"))])
DESIGNS = torch.tensor([[0.5, 1.0, 0.0], [-2.0, 2.0, 1.0], [3.0, 3.0, 0.0]], dtype=torch.float64)
KEYS = [11, 12, 13]


def evaluate(evaluator: VectorizedEvaluator | ScalarEvaluator, rows: int = 3) -> list[Evaluation]:
    return evaluator.evaluate(GENOME, DESIGNS[:rows], KEYS[:rows])


def test_together_gives_a_row_of_values_for_each_design() -> None:
    assert evaluate(VectorizedEvaluator(lambda designs: designs[:, :2])) == [
        Evaluation((0.5, 1.0)),
        Evaluation((-2.0, 2.0)),
        Evaluation((3.0, 3.0)),
    ]
    assert evaluate(VectorizedEvaluator(lambda designs: designs[:, 0])) == [
        Evaluation((0.5,)),
        Evaluation((-2.0,)),
        Evaluation((3.0,)),
    ]


def test_values_keep_double_precision() -> None:
    assert evaluate(VectorizedEvaluator(lambda designs: designs[:, 0] / 3), 1) == [Evaluation((0.5 / 3,))]


def test_values_of_lower_precision_and_with_a_gradient_are_accepted() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    assert evaluate(VectorizedEvaluator(lambda designs: designs[:, 0].float() * weight), 1) == [Evaluation((1.0,))]


def test_a_function_that_writes_into_its_table_changes_no_design() -> None:
    before = DESIGNS.clone()
    evaluate(VectorizedEvaluator(lambda designs: designs.zero_()[:, 0]))
    assert torch.equal(DESIGNS, before)


def test_one_that_fails_in_a_batch_fails_alone() -> None:
    sizes = []

    def value(designs: Tensor) -> Tensor:
        sizes.append(len(designs))
        if (designs[:, 0] < 0).any():
            raise ValueError("a negative\n   span")
        return designs[:, 0]

    assert evaluate(VectorizedEvaluator(value)) == [
        Evaluation((0.5,)),
        Evaluation(failure="ValueError: a negative span"),
        Evaluation((3.0,)),
    ]
    assert sizes == [3, 1, 1, 1]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (torch.zeros(2), r"one of shape \(2,\)"),
        (torch.zeros(()), r"one of shape \(\)"),
        (torch.zeros(1, 1, 1), r"one of shape \(1, 1, 1\)"),
        ([0.0], "a list"),
        (None, "a NoneType"),
    ],
)
def test_an_answer_of_another_shape_is_a_failure_that_says_so(answer: Any, kind: str) -> None:
    (evaluation,) = evaluate(VectorizedEvaluator(lambda _: answer), 1)
    assert evaluation.values == ()
    assert evaluation.failure is not None
    assert evaluation.failure.startswith("ValueError: expected a tensor with 1 rows of values, got ")
    assert evaluation.failure.endswith(kind.replace("\\", ""))


def test_a_batch_needs_designs() -> None:
    with pytest.raises(UserError, match="batch=0: expected a whole number greater than 0"):
        VectorizedEvaluator(lambda designs: designs, batch=0)


def test_one_by_one_gets_genes_by_name_and_with_their_types() -> None:
    seen = []
    evaluate(ScalarEvaluator(lambda design: seen.append(design) or 0.0))
    assert seen[1] == {"x": -2.0, "n": 2, "kind": "fancy"}
    assert [type(value) for value in seen[1].values()] == [float, int, str]


@pytest.mark.parametrize(
    ("answer", "values"),
    [
        (2, (2.0,)),
        (np.float32(0.5), (0.5,)),
        (torch.tensor(0.25), (0.25,)),
        ([1, 2.5], (1.0, 2.5)),
        ((1, torch.tensor(3.0)), (1.0, 3.0)),
        (torch.tensor([1.0, 2.0]), (1.0, 2.0)),
        (np.array([1.0, 2.0]), (1.0, 2.0)),
    ],
)
def test_one_by_one_takes_a_number_or_several(answer: Any, values: tuple[float, ...]) -> None:
    assert evaluate(ScalarEvaluator(lambda _: answer), 1) == [Evaluation(values)]


def test_values_by_name_are_put_in_the_order_of_the_names() -> None:
    by_name = {"lift": 1.0, "drag": 2.0, "comment": "fine"}
    assert evaluate(ScalarEvaluator(lambda _: by_name, names=("drag", "lift")), 1) == [Evaluation((2.0, 1.0))]


@pytest.mark.parametrize(
    ("answer", "names", "reason"),
    [
        ({"lift": 1.0}, ("drag", "lift", "mass"), "ValueError: no value for drag, mass"),
        (
            {"lift": 1.0},
            (),
            "ValueError: got values by name, but the evaluator has no names: pass names=, in the objectives' order",
        ),
        (None, (), "TypeError: "),
        ("much", (), "ValueError: expected numbers, got the text 'much'"),
        ("12", (), "ValueError: expected numbers, got the text '12'"),
        ([1.0, b"2"], (), "ValueError: expected numbers, got the text b'2'"),
        (torch.zeros(2, 2), (), "TypeError: "),
    ],
)
def test_a_result_that_is_no_number_is_a_failure(answer: Any, names: tuple[str, ...], reason: str) -> None:
    (evaluation,) = evaluate(ScalarEvaluator(lambda _: answer, names), 1)
    assert evaluation.values == ()
    assert evaluation.failure is not None
    assert evaluation.failure.startswith(reason)


def test_a_design_that_raises_is_a_failure_and_the_next_is_evaluated() -> None:
    def value(design: dict[str, Any]) -> float:
        return 1 / (design["n"] - 2)

    assert evaluate(ScalarEvaluator(value)) == [
        Evaluation((-1.0,)),
        Evaluation(failure="ZeroDivisionError: division by zero"),
        Evaluation((1.0,)),
    ]


def test_a_reason_is_one_line_and_not_a_page() -> None:
    def bare(_: Any) -> float:
        raise NotImplementedError

    def wordy(_: Any) -> float:
        raise RuntimeError("word\n" * 1000)

    assert evaluate(ScalarEvaluator(bare), 1) == [Evaluation(failure="NotImplementedError")]
    (evaluation,) = evaluate(ScalarEvaluator(wordy), 1)
    assert evaluation.failure is not None
    assert len(evaluation.failure) == 200
    assert evaluation.failure.startswith("RuntimeError: word word")


def test_an_error_that_cannot_be_shown_does_not_stop_the_search() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def mute(_: Any) -> float:
        raise Mute

    def odd(_: Any) -> float:
        raise FileNotFoundError("wing-\udcff.dat")  # as names of files come that are not UTF-8

    assert evaluate(ScalarEvaluator(mute), 1) == [Evaluation(failure="Mute")]
    assert evaluate(ScalarEvaluator(odd), 1) == [Evaluation(failure="FileNotFoundError: wing-\\udcff.dat")]


def test_an_interrupt_ends_the_search() -> None:
    def interrupted(_: Any) -> float:
        raise KeyboardInterrupt

    for evaluator in (ScalarEvaluator(interrupted), VectorizedEvaluator(interrupted)):  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            evaluate(evaluator, 1)


def draws(_: Any) -> list[float]:
    return [torch.rand(()).item(), float(np.random.rand()), random.random()]


def test_random_numbers_of_a_design_depend_on_its_key() -> None:
    all_three = evaluate(ScalarEvaluator(draws))
    torch.rand(7)
    np.random.rand(7)
    random.random()
    assert evaluate(ScalarEvaluator(draws)) == all_three
    assert ScalarEvaluator(draws).evaluate(GENOME, DESIGNS[1:2], KEYS[1:2]) == all_three[1:2], (
        "whatever was evaluated before it"
    )
    assert len({value for evaluation in all_three for value in evaluation.values}) == 9


def test_random_numbers_of_a_batch_depend_on_its_first_key() -> None:
    def noise(designs: Tensor) -> Tensor:
        return torch.rand(len(designs))

    first, again = (VectorizedEvaluator(noise).evaluate(GENOME, DESIGNS, KEYS) for _ in range(2))
    assert first == again != VectorizedEvaluator(noise).evaluate(GENOME, DESIGNS, KEYS[::-1])


PROGRAM_GENOME = Genome([FloatGene("x", 0.0, 1.0), IntegerGene("n", 0, 9), ChoiceGene("kind", ("plain", "fancy"))])
PROGRAM_DESIGNS = torch.tensor([[0.1, 7.0, 1.0]], dtype=torch.float64)


def shell(script: str, *, time_limit_s: float = 60.0, names: Sequence[str] = ()) -> ProgramEvaluator:
    return ProgramEvaluator(("/bin/sh", "-c", script), time_limit_s, tuple(names))


def run_program(program: ProgramEvaluator) -> Evaluation:
    (evaluation,) = program.evaluate(PROGRAM_GENOME, PROGRAM_DESIGNS, [42])
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
    program = ProgramEvaluator((sys.executable, str(script)), time_limit_s=60.0, names=("drag", "lift", "seed"))
    assert run_program(program) == Evaluation((0.1, 7.0, 42.0))


def test_genes_arrive_with_their_types(tmp_path: Path) -> None:
    run_program(shell(f"cat > {tmp_path}/task"))
    assert json.loads((tmp_path / "task").read_text()) == {"design": {"x": 0.1, "n": 7, "kind": "fancy"}, "seed": 42}


@pytest.mark.parametrize(
    ("output", "values"),
    [("3", (3.0,)), ("[1, 2.5]", (1.0, 2.5)), ("noise\\n0.125\\n\\n  \\n", (0.125,)), ("0.5", (0.5,))],
)
def test_it_may_answer_a_number_or_a_list(output: str, values: tuple[float, ...]) -> None:
    assert run_program(shell(f"printf '{output}'")) == Evaluation(values)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 3", "RuntimeError: the program ended with exit code 3"),
        ("echo 1.0; exit 1", "RuntimeError: the program ended with exit code 1"),
        ("kill -9 $$", "RuntimeError: the program ended with exit code -9"),
        ("true", "ValueError: the program printed nothing"),
        ("printf '\\n \\n'", "ValueError: the program printed nothing"),
        ("echo 1.0; echo done", "ValueError: the program's last line is not JSON: b'done'"),
        ("printf '\\377\\376'", "ValueError: the program's last line is not JSON: b'\\xff\\xfe'"),
        ("""echo '{"lift": 1}'""", "ValueError: no value for drag"),
        ("echo null", "TypeError: "),
        ("echo '[[1]]'", "TypeError: "),
    ],
)
def test_an_error_becomes_the_reason_of_a_failure(script: str, reason: str) -> None:
    evaluation = run_program(shell(script, names=["drag", "lift"]))
    assert evaluation.values == ()
    assert evaluation.failure is not None
    assert evaluation.failure.startswith(reason)


def test_a_missing_program_is_a_failure() -> None:
    failure = run_program(ProgramEvaluator(("/no/such/program",), 1.0)).failure
    assert failure is not None
    assert failure.startswith("FileNotFoundError: ")


def test_over_its_time_limit_it_is_killed_with_all_its_processes(tmp_path: Path) -> None:
    script = f"sleep 600 & echo $$ $! > {tmp_path}/pids; echo 1.0; wait"
    assert run_program(shell(script, time_limit_s=0.5)) == Evaluation(
        failure="TimeoutError: over the time limit of 0.5 s"
    )
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    for pid in pids:
        wait_for(lambda pid=pid: not is_running(pid), 10, f"process {pid} is to end")  # type: ignore[misc]


def test_processes_that_it_leaves_running_are_killed_and_not_waited_for(tmp_path: Path) -> None:
    # The one left behind holds the output open, as a pipe's reader would notice.
    assert run_program(shell(f"sleep 600 & echo $! > {tmp_path}/pid; echo 1.0")) == Evaluation((1.0,))
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not is_running(pid), 10, f"process {pid} is to end")


def test_the_last_line_of_a_long_output_is_the_answer() -> None:
    assert run_program(shell("head -c 3000000 /dev/zero | tr '\\0' 'x'; echo; echo 2.0")) == Evaluation((2.0,))


def test_a_last_line_that_is_too_long_is_no_answer() -> None:
    evaluation = run_program(shell("""printf '['; head -c 70000 /dev/zero | tr '\\0' ' '; printf '1.0]'"""))
    assert evaluation.failure is not None
    assert evaluation.failure.startswith("ValueError: the program's last line is not JSON: b' ")
    assert run_program(shell("printf '['; head -c 60000 /dev/zero | tr '\\0' ' '; printf '1.0]'")) == Evaluation((1.0,))


def test_each_design_has_its_own_process() -> None:
    designs = torch.tensor([[0.25, 1.0, 0.0], [0.5, 2.0, 0.0]], dtype=torch.float64)
    first, second = shell('read task; echo "[$$, ${#task}]"').evaluate(PROGRAM_GENOME, designs, [1, 2])
    assert first.values[0] != second.values[0]


@pytest.mark.parametrize("command", ["python evaluate.py", "", ()])
def test_a_command_is_a_list_of_words(command: Any) -> None:
    with pytest.raises(UserError, match=r"command=.*: expected separate words, as in \('python', 'evaluate.py'\)"):
        ProgramEvaluator(command, 1.0)


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), True, "10"])
def test_a_time_limit_is_a_number_above_0(limit: Any) -> None:
    with pytest.raises(UserError, match=r"time_limit_s=.*: expected a number greater than 0"):
        ProgramEvaluator(("true",), limit)
