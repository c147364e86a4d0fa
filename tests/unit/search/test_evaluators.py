"""Evaluating by a function: what it returns, what it draws, and what goes wrong with single designs."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.search.evaluators import OneByOne, Together
from lockstep.search.genome import ChoiceGene, FloatGene, Genome, IntegerGene
from lockstep.search.problem import Evaluation

GENOME = Genome([FloatGene("x", -10.0, 10.0), IntegerGene("n", 0, 9), ChoiceGene("kind", ("plain", "fancy"))])
DESIGNS = torch.tensor([[0.5, 1.0, 0.0], [-2.0, 2.0, 1.0], [3.0, 3.0, 0.0]], dtype=torch.float64)
KEYS = [11, 12, 13]


def evaluate(evaluator: Together | OneByOne, rows: int = 3) -> list[Evaluation]:
    return evaluator.evaluate(GENOME, DESIGNS[:rows], KEYS[:rows])


def test_together_gives_a_row_of_values_for_each_design() -> None:
    assert evaluate(Together(lambda designs: designs[:, :2])) == [
        Evaluation((0.5, 1.0)),
        Evaluation((-2.0, 2.0)),
        Evaluation((3.0, 3.0)),
    ]
    assert evaluate(Together(lambda designs: designs[:, 0])) == [
        Evaluation((0.5,)),
        Evaluation((-2.0,)),
        Evaluation((3.0,)),
    ]


def test_values_keep_double_precision() -> None:
    assert evaluate(Together(lambda designs: designs[:, 0] / 3), 1) == [Evaluation((0.5 / 3,))]


def test_values_of_less_precision_and_with_a_gradient_will_do() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    assert evaluate(Together(lambda designs: designs[:, 0].float() * weight), 1) == [Evaluation((1.0,))]


def test_a_function_that_writes_into_its_table_changes_no_design() -> None:
    before = DESIGNS.clone()
    evaluate(Together(lambda designs: designs.zero_()[:, 0]))
    assert torch.equal(DESIGNS, before)


def test_one_that_fails_in_a_batch_fails_alone() -> None:
    sizes = []

    def value(designs: Tensor) -> Tensor:
        sizes.append(len(designs))
        if (designs[:, 0] < 0).any():
            raise ValueError("a negative\n   span")
        return designs[:, 0]

    assert evaluate(Together(value)) == [
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
    (evaluation,) = evaluate(Together(lambda _: answer), 1)
    assert evaluation.values == ()
    assert evaluation.failure is not None
    assert evaluation.failure.startswith("ValueError: expected a tensor with 1 rows of values, got ")
    assert evaluation.failure.endswith(kind.replace("\\", ""))


def test_a_batch_needs_designs() -> None:
    with pytest.raises(UserError, match="batch=0: expected a whole number greater than 0"):
        Together(lambda designs: designs, batch=0)


def test_one_by_one_sees_genes_by_name_and_as_what_they_are() -> None:
    seen = []
    evaluate(OneByOne(lambda design: seen.append(design) or 0.0))
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
    assert evaluate(OneByOne(lambda _: answer), 1) == [Evaluation(values)]


def test_values_by_name_are_put_in_the_order_of_the_names() -> None:
    by_name = {"lift": 1.0, "drag": 2.0, "comment": "fine"}
    assert evaluate(OneByOne(lambda _: by_name, names=("drag", "lift")), 1) == [Evaluation((2.0, 1.0))]


@pytest.mark.parametrize(
    ("answer", "names", "reason"),
    [
        ({"lift": 1.0}, ("drag", "lift", "mass"), "ValueError: no value for drag, mass"),
        ({"lift": 1.0}, (), "ValueError: values by name, and the evaluator was given no names="),
        (None, (), "TypeError: "),
        ("much", (), "ValueError: expected numbers, got the text 'much'"),
        ("12", (), "ValueError: expected numbers, got the text '12'"),
        ([1.0, b"2"], (), "ValueError: expected numbers, got the text b'2'"),
        (torch.zeros(2, 2), (), "TypeError: "),
    ],
)
def test_what_is_no_number_is_a_failure(answer: Any, names: tuple[str, ...], reason: str) -> None:
    (evaluation,) = evaluate(OneByOne(lambda _: answer, names), 1)
    assert evaluation.values == ()
    assert evaluation.failure is not None
    assert evaluation.failure.startswith(reason)


def test_a_design_that_raises_is_a_failure_and_the_next_is_evaluated() -> None:
    def value(design: dict[str, Any]) -> float:
        return 1 / (design["n"] - 2)

    assert evaluate(OneByOne(value)) == [
        Evaluation((-1.0,)),
        Evaluation(failure="ZeroDivisionError: division by zero"),
        Evaluation((1.0,)),
    ]


def test_a_reason_is_one_line_and_not_a_page() -> None:
    def bare(_: Any) -> float:
        raise NotImplementedError

    def wordy(_: Any) -> float:
        raise RuntimeError("word\n" * 1000)

    assert evaluate(OneByOne(bare), 1) == [Evaluation(failure="NotImplementedError")]
    (evaluation,) = evaluate(OneByOne(wordy), 1)
    assert evaluation.failure is not None
    assert len(evaluation.failure) == 200
    assert evaluation.failure.startswith("RuntimeError: word word")


def test_a_reason_that_cannot_be_told_or_shown_stops_nothing() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def mute(_: Any) -> float:
        raise Mute

    def odd(_: Any) -> float:
        raise FileNotFoundError("wing-\udcff.dat")  # as names of files come that are not UTF-8

    assert evaluate(OneByOne(mute), 1) == [Evaluation(failure="Mute")]
    assert evaluate(OneByOne(odd), 1) == [Evaluation(failure="FileNotFoundError: wing-\\udcff.dat")]


def test_who_wants_the_search_to_end_is_not_held() -> None:
    def interrupted(_: Any) -> float:
        raise KeyboardInterrupt

    for evaluator in (OneByOne(interrupted), Together(interrupted)):  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            evaluate(evaluator, 1)


def draws(_: Any) -> list[float]:
    return [torch.rand(()).item(), float(np.random.rand()), random.random()]


def test_what_a_design_draws_begins_at_its_key() -> None:
    all_three = evaluate(OneByOne(draws))
    torch.rand(7)
    np.random.rand(7)
    random.random()
    assert evaluate(OneByOne(draws)) == all_three
    assert OneByOne(draws).evaluate(GENOME, DESIGNS[1:2], KEYS[1:2]) == all_three[1:2], "whoever came before it"
    assert len({value for evaluation in all_three for value in evaluation.values}) == 9


def test_what_a_batch_draws_begins_at_its_first_key() -> None:
    def noise(designs: Tensor) -> Tensor:
        return torch.rand(len(designs))

    first, again = (Together(noise).evaluate(GENOME, DESIGNS, KEYS) for _ in range(2))
    assert first == again != Together(noise).evaluate(GENOME, DESIGNS, KEYS[::-1])
