"""Field types, the training config, and the line that each fault becomes."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field, FilePath, ValidationError, field_validator

from lockstep.config.draft import read
from lockstep.config.duration import Duration
from lockstep.config.fields import Count, Flag, Frozen, NonNegative, Positive, Section, Whole
from lockstep.config.resolved import digest, dump
from lockstep.config.schema import BatchConfig, Config, GroupConfig, OptimConfig, ScheduleConfig
from lockstep.errors import ConfigError
from tests.unit.config.conftest import VALID, problems_of

Write = Callable[..., Path]


class Fields(Frozen):
    count: Count = 1
    whole: Whole = 0
    flag: Flag = False
    positive: Positive = 1.0
    non_negative: NonNegative = 0.0


class Item(Frozen):
    size: Count


class Varied(Frozen):
    """Types that a user's own schema may have."""

    either: int | str = 0
    pair: tuple[int, int] = (1, 2)
    where: Path = Path("/here")
    existing: FilePath | None = None
    items: tuple[Item, ...] = ()
    table: dict[str, Item] = Field(default_factory=dict)
    even: int = 0
    short: Annotated[str, Field(max_length=3)] = ""
    depth: Annotated[int, Field(ge=1, le=9)] = 1
    mode: Literal[1, 2, "auto"] = 1
    tree: "Varied | None" = None

    @field_validator("even")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("must be even,\nnot odd")
        return value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("count: 3", 3),
        ("count: 1e3", 1000),
        ("whole: 0", 0),
        ("flag: true", True),
        ("flag: NO", False),
        ("flag: On", True),
        ("flag: yes", True),
        ("flag: off", False),
        ("flag: 'False'", False),
        ("positive: 3", 3.0),
        ("positive: 3e-4", 3e-4),
        ("non_negative: 0", 0.0),
    ],
)
def test_field_accepts(write: Write, text: str, value: object) -> None:
    accepted = getattr(read(write(text)).check(Fields), text.partition(":")[0])
    assert (accepted, type(accepted)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("count: 1.5", "expected a whole number greater than 0, got 1.5"),
        ("count: 0", "expected a whole number greater than 0, got 0"),
        ("count: true", "expected a whole number greater than 0, got true"),
        ("count: '3'", "expected a whole number greater than 0, got '3'"),
        ("count: null", "expected a whole number greater than 0, got null"),
        ("count: .inf", "expected a whole number greater than 0, got .inf"),
        ("count: 1e30", "expected a whole number below 2⁶³"),
        ("whole: -1", "expected a whole number of at least 0, got -1"),
        ("flag: 1", "expected true or false, got 1"),
        ("flag: 0.0", "expected true or false, got 0.0"),
        ("flag: maybe", "expected true or false, got 'maybe'"),
        ("positive: 0", "expected a number greater than 0, got 0"),
        ("positive: true", "expected a number greater than 0, got true"),
        ("positive: '1'", "expected a number greater than 0, got '1'"),
        ("positive: .inf", "expected a finite number, got .inf"),
        ("positive: .nan", "expected a finite number, got .nan"),
        ("non_negative: -0.5", "expected a number of at least 0, got -0.5"),
        ("non_negative: [1]", "expected a number of at least 0, got a list"),
        ("non_negative: {a: 1}", "expected a number of at least 0, got a mapping"),
    ],
)
def test_field_refuses(write: Write, text: str, problem: str) -> None:
    assert problems_of(write(text), schema=Fields) == [f"run.yaml:1: {text.partition(':')[0]}: {problem}"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("count", True),
        ("count", "3"),
        ("whole", False),
        ("flag", 1),
        ("flag", 0.0),
        ("positive", True),
        ("non_negative", True),
        ("positive", "1"),
    ],
)
def test_field_refuses_in_python_too(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=name):
        Fields.model_validate({name: value})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("either: [1]", "either: expected a whole number or text, got a list"),
        ("pair: [1, x]", "pair[1]: expected a whole number, got 'x'"),
        ("pair: 3", "pair: expected a list, got 3"),
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
        "run.yaml: items[0].size: missing; expected a whole number greater than 0"
    ]


def test_smallest_config_has_documented_defaults(write: Write) -> None:
    config = Config.from_file(write(VALID))
    assert config == Config(
        recipe="digits",
        seed=0,
        epochs=3,
        steps=None,
        batch=BatchConfig(global_batch=64),
        optim=OptimConfig(
            name="adamw",
            lr=1e-3,
            lr_scaling="none",
            base_batch=None,
            weight_decay=0.0,
            momentum=0.9,
            nesterov=False,
            betas=(0.9, 0.999),
            eps=1e-8,
            groups=(),
        ),
        schedule=ScheduleConfig(
            kind="constant", warmup=Duration.parse(0), length=None, final=0.0, every=None, factor=0.1
        ),
        device="auto",
        threads=1,
        use_ddp=True,
        ddp_backend="auto",
        timeout_s=600.0,
        log_every=10,
        model=Section(),
        data=Section(),
    )


def test_empty_file_lacks_what_is_required(write: Write) -> None:
    assert problems_of(write("")) == [
        "run.yaml: steps: give exactly one of epochs and steps",
        "run.yaml: batch: missing; expected a mapping",
    ]


def test_several_problems_at_once_each_with_its_place(write: Write) -> None:
    text = VALID + "optim:\n  lrr: 1\n  lr: fast\n  name: adamm\nlr: 1\noptim.lr: 2\n"
    assert problems_of(write(text), ["epochs=1.5", "device=gpu", "seed=yes"]) == [
        "command line: seed: expected a whole number of at least 0, got 'yes'",
        "command line: device: expected one of auto, cpu, cuda, mps, got 'gpu'; did you mean cpu?",
        "command line: epochs: expected a whole number greater than 0, got 1.5",
        "run.yaml:7: optim.name: expected one of sgd, adam, adamw, got 'adamm'; did you mean adam?",
        "run.yaml:6: optim.lr: expected a number greater than 0, got 'fast'",
        "run.yaml:5: optim.lrr: unknown key; did you mean optim.lr?",
        "run.yaml:8: lr: unknown key; did you mean optim.lr?",
        "run.yaml:9: optim.lr: unknown key; a dot does not nest in a file: write lr under optim",
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


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["epochs=1", "steps=5"], "command line: steps: give exactly one of epochs and steps"),
        (["epochs=null"], "run.yaml: steps: give exactly one of epochs and steps"),
        (
            ["batch.global=1", "batch.per_device=5"],
            "command line: batch.per_device: give exactly one of global and per_device",
        ),
        (["batch.global="], "command line: batch.per_device: give exactly one of global and per_device"),
        (["accumulate=2"], "command line: accumulate: goes with batch.per_device; with batch.global, lanes says it"),
        (["evaluate_every=0 steps"], "command line: evaluate_every: expected a duration greater than 0, got 0 steps"),
    ],
)
def test_exactly_one_of_two(write: Write, overrides: list[str], problem: str) -> None:
    assert problems_of(write(VALID), overrides) == [problem]


def test_steps_and_per_device_instead(write: Write) -> None:
    config = Config.from_file(write("recipe: digits\nsteps: 1e3\nbatch: {per_device: 8}\n"))
    assert (config.epochs, config.steps, config.batch.global_batch, config.batch.per_device) == (None, 1000, None, 8)


def test_file_knows_a_field_by_its_alias_only(write: Write) -> None:
    assert problems_of(write("recipe: digits\nepochs: 3\nbatch: {global_batch: 64}\n")) == [
        "run.yaml:3: batch.per_device: give exactly one of global and per_device",
        "run.yaml:3: batch.global_batch: unknown key; did you mean batch.global?",
    ]


def test_config_cannot_be_changed(write: Write) -> None:
    config = Config.from_file(write(VALID + "model: {encoder: {sizes: [1, {width: 2}]}}\n"))
    for part, name in (
        (config, "seed"),
        (config.optim, "lr"),
        (config.model, "encoder"),
        (config.model.encoder, "new"),
    ):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(part, name, 1)
    assert isinstance(config.model.encoder.sizes, tuple)


def test_section_is_read_by_attributes_all_the_way(write: Write) -> None:
    config = Config.from_file(write(VALID + "model: {encoder: {width: 64, layers: [{size: 1}]}, name: no}\n"))
    assert config.model.encoder.width == 64
    assert config.model.encoder.layers[0].size == 1
    assert config.model.name == "no"
    assert config.model == Section(encoder={"width": 64, "layers": [{"size": 1}]}, name="no")
    with pytest.raises(AttributeError):
        _ = config.model.absent


def test_section_refuses_keys_that_attributes_would_hide(write: Write) -> None:
    assert problems_of(write(VALID + "data: {copy: 1}\nmodel:\n  inner: {json: 2}\n")) == [
        "run.yaml:6: model.inner: the key json is taken; choose another",
        "run.yaml:4: data: the key copy is taken; choose another",
    ]


def test_recipe_narrows_a_section_to_its_own_class(write: Write) -> None:
    class Model(Frozen):
        width: Count = 8

    class Mine(Config):
        model: Model = Model()

    path = write(VALID)
    assert Mine.from_file(path, ["model.width=16"]).model == Model(width=16)
    assert problems_of(path, ["model.widht=16"], Mine) == [
        "command line: model.widht: unknown key; did you mean model.width?"
    ]
    assert problems_of(path, ["model=16"], Mine) == ["command line: model: expected a mapping, got 16"]


def test_error_carries_no_pydantic_error_into_the_traceback(write: Write) -> None:
    with pytest.raises(ConfigError) as caught:
        read(write("")).check(Config)
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None


def test_schema_that_json_cannot_describe_still_loads(write: Write) -> None:
    class Odd(BaseModel, arbitrary_types_allowed=True):
        thing: complex = 1j
        opaque: Callable[[], int] = int
        size: int = 0

    assert problems_of(write("size: x\nopaque: 3"), schema=Odd) == [
        "run.yaml:2: opaque: expected callable, got 3",
        "run.yaml:1: size: expected a whole number, got 'x'",
    ]


def test_schedule_speaks_of_steps_epochs_and_samples(write: Write) -> None:
    text = "schedule: {kind: step, warmup: 5e2, length: 0.50 epochs, every: 1e6 samples, factor: 0.5}\n"
    config = Config.from_file(write(VALID + text))
    schedule = config.schedule
    assert list(map(str, (schedule.warmup, schedule.length, schedule.every))) == [
        "500 steps",
        "0.5 epochs",
        "1000000 samples",
    ]
    assert Config.from_file(write(dump(config))) == config
    same = Config.from_file(write(VALID + text), ["schedule.warmup=500 steps", "schedule.length=.5 epoch"])
    assert digest(same) == digest(config)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "schedule.warmup=5 weeks",
            "schedule.warmup: expected a duration, as in 500 steps, 2 epochs or 1e6 samples, got '5 weeks'",
        ),
        ("schedule.warmup=1.5 steps", "schedule.warmup: expected a whole number of steps, got '1.5 steps'"),
        ("schedule.length=0 epochs", "schedule.length: expected a duration greater than 0, got 0 epochs"),
        ("schedule={kind: step}", "schedule.every: kind step needs a duration, as in 30 epochs"),
        ("schedule={kind: step, every: 0}", "schedule.every: expected a duration greater than 0, got 0 steps"),
        ("schedule.factor=2", "schedule.factor: expected a number greater than 0 and of at most 1, got 2"),
        ("schedule.final=-1", "schedule.final: expected a number of at least 0, got -1"),
        (
            "schedule.kind=cosin",
            "schedule.kind: expected one of constant, linear, cosine, step, got 'cosin'; did you mean cosine?",
        ),
        (
            "optim.lr_scaling=linear",
            "optim.base_batch: lr_scaling linear needs the global batch that lr was found at",
        ),
        ("optim={nesterov: true, momentum: 0}", "optim.nesterov: needs a momentum greater than 0"),
        ("optim.betas=[0.9, 1.0]", "optim.betas[1]: expected a number of at least 0 and less than 1, got 1.0"),
        ("optim.groups=[{match: a}, {mach: b}]", "optim.groups[1].match: missing; expected text"),
        (
            "optim.groups=[{match: a, lr_factor: -1}]",
            "optim.groups[0].lr_factor: expected a number of at least 0, got -1",
        ),
    ],
)
def test_a_wrong_schedule_or_optimizer_is_one_line(write: Write, override: str, problem: str) -> None:
    first = problems_of(write(VALID + "optim: {}\n"), [override])[0]
    assert first.partition(": ")[2] == problem


def test_scaling_and_groups_are_read(write: Write) -> None:
    text = "optim: {lr_scaling: sqrt, base_batch: 32, groups: [{match: '*.bias', lr_factor: 0.1, weight_decay: 0}]}\n"
    optim = Config.from_file(write(VALID + text)).optim
    assert (optim.lr_scaling, optim.base_batch) == ("sqrt", 32)
    assert optim.groups == (GroupConfig(match="*.bias", lr_factor=0.1, weight_decay=0.0),)
