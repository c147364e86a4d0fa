"""Field types: what each accepts, free-form sections, and private values, which are never shown resolved."""

import pickle
from pathlib import Path

import pytest
from pydantic import Field, ValidationError

from lockstep.config.config_errors import ONLY_PRIVATE
from lockstep.config.config_file import read_config
from lockstep.config.field_types import (
    ConfigSection,
    Flag,
    Frozen,
    NonNegative,
    Positive,
    PositiveInt,
    Private,
    Whole,
)
from lockstep.config.resolved_config import config_changes, config_digest, dump_config
from lockstep.config.train_schema import Config
from lockstep.errors import ConfigError
from tests.unit.config.config_problems import VALID, Write, problems_of

SECRET = "hunter2-s3cr3t"


class Fields(Frozen):
    count: PositiveInt = 1
    whole: Whole = 0
    flag: Flag = False
    positive: Positive = 1.0
    non_negative: NonNegative = 0.0


class Data(Frozen):
    path: Private = Private("/data")
    token: Private | None = None
    mirrors: tuple[Private, ...] = ()
    name: str = ""
    files: tuple[Path, ...] = ()


class Mine(Config):
    data: Data = Data()
    cache: Private = Private("${LOCKSTEP_TEST_CACHE}")


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TEST_TOKEN", SECRET)
    monkeypatch.setenv("LOCKSTEP_TEST_CACHE", "/cache")
    monkeypatch.delenv("LOCKSTEP_TEST_UNSET", raising=False)


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
    accepted = getattr(read_config(write(text)).check(Fields), text.partition(":")[0])
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
        ("count: 1e30", "expected a whole number below 2⁶³, got 1e+30"),
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


def test_section_is_read_by_attributes_at_every_level(write: Write) -> None:
    config = Config.from_file(write(VALID + "model: {encoder: {width: 64, layers: [{size: 1}]}, name: no}\n"))
    assert config.model.encoder.width == 64
    assert config.model.encoder.layers[0].size == 1
    assert config.model.name == "no"
    assert config.model == ConfigSection(encoder={"width": 64, "layers": [{"size": 1}]}, name="no")
    with pytest.raises(AttributeError):
        _ = config.model.absent


def test_section_refuses_keys_that_methods_would_hide(write: Write) -> None:
    assert problems_of(write(VALID + "data: {copy: 1}\nmodel:\n  inner: {json: 2}\n")) == [
        "run.yaml:6: model.inner: the key json is reserved; rename it",
        "run.yaml:4: data: the key copy is reserved; rename it",
    ]


def test_reveals_at_the_moment_of_use(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(VALID + "data:\n  path: ${LOCKSTEP_TEST_CACHE}/a/${LOCKSTEP_TEST_CACHE}\n")
    config = Mine.from_file(path)
    assert config.data.path.reveal() == "/cache/a//cache"
    monkeypatch.setenv("LOCKSTEP_TEST_CACHE", "/new")
    assert config.data.path.reveal() == "/new/a//new"


@pytest.mark.parametrize("text", ["$LOCKSTEP_TEST_TOKEN", "$$", "a$", "{LOCKSTEP_TEST_TOKEN}", "", "/plain/path"])
def test_other_dollars_are_literal(text: str) -> None:
    assert Private(text).reveal() == text


def test_doubled_dollar_does_not_escape(write: Write) -> None:
    assert Private("$${LOCKSTEP_TEST_CACHE}").reveal() == "$/cache"
    assert Private("$${LOCKSTEP_TEST_CACHE}{a}").reveal() == "$/cache{a}"


def test_revealed_text_is_not_resolved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TEST_CACHE", "${LOCKSTEP_TEST_TOKEN}")
    assert Private("${LOCKSTEP_TEST_CACHE}").reveal() == "${LOCKSTEP_TEST_TOKEN}"


def test_empty_variable_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TEST_CACHE", "")
    assert Private("a${LOCKSTEP_TEST_CACHE}b").reveal() == "ab"


def test_secret_is_in_no_output(write: Write, tmp_path: Path) -> None:
    path = write(VALID + "data: {token: 'x${LOCKSTEP_TEST_TOKEN}', mirrors: ['${LOCKSTEP_TEST_TOKEN}']}\n")
    config = Mine.from_file(path)
    other = Mine.from_file(path, ["data.token=y"])
    assert config.data.token is not None
    assert config.data.token.reveal() == "x" + SECRET
    outputs = [
        repr(config),
        str(config),
        str(config.data.token),
        repr(config.model_dump()),
        config.model_dump_json(),
        dump_config(config),
        config_digest(config),
        *config_changes(config, other),
        repr(read_config(path)),
        repr(pickle.dumps(config.data.token)),
    ]
    assert not [output for output in outputs if SECRET in output]
    assert str(config.data.token) == config.model_dump(mode="json")["data"]["token"] == "x${LOCKSTEP_TEST_TOKEN}"
    assert Mine.from_file(write(dump_config(config), "again.yaml")) == config


def test_draft_does_not_show_what_may_turn_out_private(write: Write) -> None:
    assert SECRET not in repr(read_config(write(f"token: {SECRET}\n")))


def test_references_in_ordinary_fields_are_refused_all_at_once(write: Write) -> None:
    text = VALID + (
        "data:\n  name: a${LOCKSTEP_TEST_TOKEN}\n  files: [/x, '${LOCKSTEP_TEST_TOKEN}/y']\n"
        "  token: ${LOCKSTEP_TEST_TOKEN}\n"
        "model: {free: [{form: '${LOCKSTEP_TEST_TOKEN}'}]}\n"
    )
    problems = problems_of(write(text), ["recipe=${LOCKSTEP_TEST_UNSET}", "sead=${LOCKSTEP_TEST_TOKEN}"], Mine)
    assert problems == [
        "command line: sead: unknown key; did you mean seed?",
        f"command line: recipe: ${{LOCKSTEP_TEST_UNSET}} {ONLY_PRIVATE}",
        f"run.yaml:5: data.name: ${{LOCKSTEP_TEST_TOKEN}} {ONLY_PRIVATE}",
        f"run.yaml:6: data.files[1]: ${{LOCKSTEP_TEST_TOKEN}} {ONLY_PRIVATE}",
        f"run.yaml:8: model.free[0].form: ${{LOCKSTEP_TEST_TOKEN}} {ONLY_PRIVATE}",
    ]


def test_reference_in_an_ordinary_field_is_enough_to_refuse(write: Write) -> None:
    (problem,) = problems_of(write(VALID), ["model.path=${LOCKSTEP_TEST_CACHE}/x"], Mine)
    assert problem == f"command line: model.path: ${{LOCKSTEP_TEST_CACHE}} {ONLY_PRIVATE}"


def test_dollar_in_an_ordinary_field_is_literal(write: Write) -> None:
    assert Mine.from_file(write(VALID), ["data.name=$HOME $$ ${}"]).data.name == "$HOME $$ ${}"


def test_unset_variable_is_found_at_load_time(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(VALID + "data: {path: '${LOCKSTEP_TEST_UNSET}/${ALSO_UNSET}', token: '${LOCKSTEP_TEST_UNSET}'}\n")
    assert problems_of(path, schema=Mine) == [
        "run.yaml:4: data.path: environment variables LOCKSTEP_TEST_UNSET, ALSO_UNSET are not set",
        "run.yaml:4: data.token: environment variable LOCKSTEP_TEST_UNSET is not set",
    ]
    monkeypatch.delenv("LOCKSTEP_TEST_CACHE")
    assert problems_of(write(VALID), schema=Mine) == [
        "run.yaml: cache: environment variable LOCKSTEP_TEST_CACHE is not set"
    ]


def test_unset_variable_is_found_beside_other_faults(write: Write) -> None:
    text = VALID + "data: {token: '${LOCKSTEP_TEST_UNSET} ${LOCKSTEP_TEST_UNSET}'}\nseed: x\n"
    assert problems_of(write(text), schema=Mine) == [
        "run.yaml:5: seed: expected a whole number of at least 0, got 'x'",
        "run.yaml:4: data.token: environment variable LOCKSTEP_TEST_UNSET is not set",
    ]


def test_unset_variable_of_a_default_is_found_wherever_it_is(write: Write) -> None:
    class Defaults(Frozen):
        table: dict[str, tuple[Private, ...]] = Field(
            default_factory=lambda: {"a": (Private("${LOCKSTEP_TEST_UNSET}"),)}
        )

    assert problems_of(write(""), schema=Defaults) == [
        "run.yaml: table.a[0]: environment variable LOCKSTEP_TEST_UNSET is not set"
    ]


def test_unset_variable_is_found_at_reveal_time() -> None:
    with pytest.raises(ConfigError, match=r"^environment variable LOCKSTEP_TEST_UNSET is not set$"):
        Private(f"{SECRET}${{LOCKSTEP_TEST_UNSET}}").reveal()


@pytest.mark.parametrize("value", ["${", "${}", "${A B}", "${A:-default}", "${1A}", "${A"])
def test_malformed_reference_is_refused(write: Write, value: str) -> None:
    (problem,) = problems_of(write(VALID), [f'data.token="{SECRET}{value}"'], Mine)
    assert problem.startswith("command line: data.token: expected ${NAME} for an environment variable")


@pytest.mark.parametrize(
    "value", ["12345", "[hunter2]", "{hunter2: 1}", "true", "*hunter2", "!hunter2 x", "!!int hunter2"]
)
@pytest.mark.parametrize("key", ["token", "path"])
def test_error_never_shows_a_private_value(write: Write, key: str, value: str) -> None:
    (problem,) = problems_of(write(VALID + f"data: {{{key}: {value}}}\n"), schema=Mine)
    assert "hunter2" not in problem
    assert "12345" not in problem


def test_private_text_is_hidden_from_errors_raised_in_python() -> None:
    with pytest.raises(ValueError, match="token") as caught:
        Data(token=[SECRET])  # type: ignore[arg-type]
    assert SECRET not in str(caught.value)
    assert Data(token="a").token == Private("a")  # type: ignore[arg-type]
