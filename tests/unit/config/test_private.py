"""References to the environment: only where they are private, resolved only when revealed, never shown."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import Field

from lockstep.config.draft import read
from lockstep.config.fields import Frozen
from lockstep.config.private import Private
from lockstep.config.resolved import difference, digest, dump
from lockstep.config.schema import Config
from lockstep.errors import ConfigError
from tests.unit.config.conftest import VALID, problems_of

Write = Callable[..., Path]

SECRET = "hunter2-s3cr3t"
ONLY_PRIVATE = "would be written to the run folder; only private fields may refer to the environment"


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
        dump(config),
        digest(config),
        *difference(config, other),
        repr(read(path)),
        repr(pickle.dumps(config.data.token)),
    ]
    assert not [output for output in outputs if SECRET in output]
    assert str(config.data.token) == config.model_dump(mode="json")["data"]["token"] == "x${LOCKSTEP_TEST_TOKEN}"
    assert Mine.from_file(write(dump(config), "again.yaml")) == config


def test_draft_does_not_show_what_may_turn_out_private(write: Write) -> None:
    assert SECRET not in repr(read(write(f"token: {SECRET}\n")))


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
    assert problem.startswith("command line: data.token: a reference to the environment is written ${NAME}")


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
