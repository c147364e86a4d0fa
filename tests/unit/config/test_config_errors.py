"""How each mistake in a config is worded: one line with the place, the key, what was expected and what was found."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field, FilePath, field_validator

from lockstep.config.config_file import read_config
from lockstep.config.field_types import (
    Frozen,
    PositiveInt,
)
from lockstep.config.train_schema import Config
from lockstep.errors import ConfigError
from tests.unit.config.config_problems import VALID, Write, problems_of


class Item(Frozen):
    size: PositiveInt


class Varied(Frozen):
    """Types that a user's schema may have."""

    either: int | str = 0
    pair: tuple[int, int] = (1, 2)
    where: Path = Path("/here")
    existing: FilePath | None = None
    items: tuple[Item, ...] = ()
    table: dict[str, Item] = Field(default_factory=dict)
    even: int = 0
    few: Annotated[tuple[int, ...], Field(max_length=2)] = ()
    short: Annotated[str, Field(max_length=3)] = ""
    depth: Annotated[int, Field(ge=1, le=9)] = 1
    mode: Literal[1, 2, "auto"] = 1
    tree: "Varied | None" = None
    branches: Literal["yes", "no"] | Item = "yes"

    @field_validator("even")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("must be even,\nnot odd")
        return value


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("either: [1]", "either: expected a whole number or text, got a list"),
        ("pair: [1, x]", "pair[1]: expected a whole number, got 'x'"),
        ("pair: 3", "pair: expected a list of 2 values, got 3"),
        ("pair: [1]", "pair: expected a list of 2 values, got 1 value"),
        ("pair: [1, 2, 3]", "pair: expected a list of 2 values, got 3 values"),
        ("few: [1, 2, 3]", "few: Tuple should have at most 2 items after validation, not 3, got a list"),
        ("branches: yess", "branches: expected one of yes, no, or a mapping, got 'yess'; did you mean yes?"),
        ("branches: {sise: 1, size: 1}", "branches.sise: unknown key; did you mean branches.size?"),
        ("branches: {size: 0}", "branches.size: expected a whole number greater than 0, got 0"),
        ("where: 3", "where: expected a path, got 3"),
        ("existing: /absent", "existing: Path does not point to a file"),
        ("items: [{size: 1}, {size: x}]", "items[1].size: expected a whole number greater than 0, got 'x'"),
        ("items: [{sise: 1, size: 1}]", "items[0].sise: unknown key; did you mean items[0].size?"),
        ("table: {a: {size: 0}}", "table.a.size: expected a whole number greater than 0, got 0"),
        ("even: 3", "even: must be even, not odd"),
        ("short: abcd", "short: String should have at most 3 characters, got 'abcd'"),
        ("depth: 10", "depth: expected a whole number from 1 to 9, got 10"),
        ("mode: autom", "mode: expected one of 1, 2, auto, got 'autom'; did you mean auto?"),
        (
            "tree: {tree: {depth: x}}",
            "tree.tree.depth: expected a whole number from 1 to 9, got 'x'",
        ),
        (f"depth: {'x' * 99}", f"depth: expected a whole number from 1 to 9, got '{'x' * 58}…"),
        ('"a\\nb": 1', "a\\nb: unknown key"),
    ],
)
def test_any_type_becomes_one_readable_line(write: Write, text: str, problem: str) -> None:
    assert problems_of(write(text), schema=Varied) == [f"run.yaml:1: {problem}"]


def test_missing_key_inside_a_list_names_its_place(write: Write) -> None:
    assert problems_of(write("items: [{}]"), schema=Varied) == [
        "run.yaml:1: items[0].size: missing; expected a whole number greater than 0"
    ]


def test_several_problems_at_once_each_with_its_place(write: Write) -> None:
    text = VALID + "optim:\n  lrr: 1\n  lr: fast\n  name: ad-am\nlr: 1\noptim.lr: 2\n"
    assert problems_of(write(text), ["epochs=1.5", "device=gpu", "seed=yes"]) == [
        "command line: seed: expected a whole number of at least 0, got 'yes'",
        "command line: device: expected one of auto, cpu, cuda, mps, got 'gpu'; did you mean cpu?",
        "command line: epochs: expected a whole number greater than 0, got 1.5",
        "run.yaml:7: optim.name: expected sgd, adam, adamw, a class of torch.optim, or package.module:Class, got "
        "'ad-am'",
        "run.yaml:6: optim.lr: expected a number greater than 0, got 'fast'",
        "run.yaml:5: optim.lrr: unknown key; did you mean optim.lr?",
        "run.yaml:8: lr: unknown key; did you mean optim.lr?",
        "run.yaml:9: optim.lr: unknown key; dots do not nest keys in a file: write lr under optim",
    ]


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("epoch", "; did you mean epochs?"),
        ("optimizer", "; did you mean optim?"),
        ("lr", "; did you mean optim.lr?"),
        ("weight_decy", "; did you mean optim.weight_decay?"),
        ("optim.global", "; did you mean batch.global?"),
        ("batch.global_batch", "; did you mean batch.global?"),
        ("qqqq", ""),
    ],
)
def test_unknown_key_suggests_the_nearest(write: Write, key: str, suggestion: str) -> None:
    assert problems_of(write(VALID), [f"{key}=1"]) == [f"command line: {key}: unknown key{suggestion}"]


def test_outermost_of_equally_named_keys_is_suggested(write: Write) -> None:
    class Inner(Frozen):
        width: int = 1

    class Middle(Frozen):
        inner: Inner = Inner()
        width: int = 1

    class Outer(Frozen):
        middle: Middle = Middle()

    assert problems_of(write("width: 3"), schema=Outer) == [
        "run.yaml:1: width: unknown key; did you mean middle.width?"
    ]


def test_schema_that_json_cannot_describe_still_loads(write: Write) -> None:
    class Odd(BaseModel, arbitrary_types_allowed=True):
        thing: complex = 1j
        opaque: Callable[[], int] = int
        size: int = 0

    assert problems_of(write("size: x\nopaque: 3"), schema=Odd) == [
        "run.yaml:2: opaque: expected callable, got 3",
        "run.yaml:1: size: expected a whole number, got 'x'",
    ]


def test_error_carries_no_pydantic_error_into_the_traceback(write: Write) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(write("")).check(Config)
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None
