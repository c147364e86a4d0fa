"""A validated config as YAML, its digest, and the changes from one config to another."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from lockstep.config.config_file import read_config
from lockstep.config.field_types import ConfigSection, Frozen, PositiveInt
from lockstep.config.resolved_config import config_changes, config_digest, dump_config
from lockstep.config.train_schema import Config
from lockstep.config.yaml_document import parse_yaml_mapping
from tests.unit.config.config_problems import VALID, Write


class Data(Frozen):
    files: tuple[Path, ...] = (Path("/a"), Path("/b"))
    table: dict[str, PositiveInt] = Field(default_factory=lambda: {"x": 1})


class Mine(Config):
    data: Data = Data()


def test_dump_follows_the_file(write: Write) -> None:
    text = dump_config(Mine.from_file(write(VALID), ["optim.lr=1e-05", "model.name=no"]))
    assert list(yaml.safe_load(text)) == list(Mine.model_fields)
    assert "batch:\n  global: 64\n  per_device: null\n" in text
    assert "lr: 1.0e-05\n" in text
    assert "name: 'no'\n" in text


def test_dump_reads_back_as_an_equal_config(write: Write) -> None:
    model = "{a: 1e6, b: ['1e6', .inf, null, {c: '~'}], 'x.y': 'yes', 0x: 2024-01-01}"
    config = Mine.from_file(write(VALID + f"model: {model}\n"), ["data.table={y: 2}"])
    again = read_config(write(dump_config(config), "again.yaml")).check(Mine)
    assert again == config
    assert (dump_config(again), config_digest(again)) == (dump_config(config), config_digest(config))


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
awkward = st.sampled_from(
    [
        "no",
        "1e6",
        "1_000",
        "0o7",
        "1:30",
        "~",
        "<<",
        "=",
        "",
        " a",
        "a: b",
        "#",
        "2024-01-01",
        ".5",
        "\x85",
        "\u2028",
        "a\nb",
    ]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text | awkward
keys = (text | awkward).filter(lambda key: key not in dir(ConfigSection))
plain = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


def exact(value: Any) -> Any:
    """The value with its types, because 1 == 1.0 == True."""
    if isinstance(value, dict):
        return {key: exact(item) for key, item in value.items()}
    return [exact(item) for item in value] if isinstance(value, list) else (type(value), value)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(plain)
def test_any_plain_data_survives_dump_and_read(value: Any) -> None:
    section = ConfigSection(key=value)
    read_back = parse_yaml_mapping(dump_config(section), "run.yaml").plain()
    assert exact(read_back) == exact({"key": value})


@settings(max_examples=50, deadline=None, derandomize=True)
@given(plain, plain)
def test_digest_and_changes_agree(one: Any, other: Any) -> None:
    a, b = ConfigSection(key=one), ConfigSection(key=other)
    assert (config_digest(a) == config_digest(b)) == (config_changes(a, b) == [])
    assert config_changes(a, a) == []


def test_digest_does_not_depend_on_the_order_in_the_file(write: Write) -> None:
    one = Config.from_file(write(VALID + "model: {a: 1, b: 2}\nseed: 3\n"))
    other = Config.from_file(write("seed: 3\nmodel: {b: 2, a: 1}\n" + VALID))
    assert config_digest(one) == config_digest(other)
    assert len(config_digest(one)) == 64
    assert config_digest(one) != config_digest(Config.from_file(write(VALID)))


@pytest.mark.parametrize(("a", "b"), [(1, 1.0), (1, True), ({}, None), ([], {}), ({"x": {}}, {})])
def test_digest_tells_types_apart(a: Any, b: Any) -> None:
    assert config_digest(ConfigSection(key=a)) != config_digest(ConfigSection(key=b))
    assert config_changes(ConfigSection(key=a), ConfigSection(key=b))


def test_digest_is_the_same_in_every_release() -> None:
    config = Config(recipe="digits", epochs=1, batch={"global": 8})  # type: ignore[arg-type]
    assert (
        config_digest(ConfigSection(a=1, b=[0.5, "ü"]))
        == "15fe6eb13ecbf17e7ee1d650d82301a5f5c64f187835d63b4154c8677aa246f9"
    )
    assert config_digest(config) == config_digest(Config.model_validate(config.model_dump(by_alias=True)))


def test_changes_are_one_line_for_each_key(write: Write) -> None:
    path = write(VALID + "model: {sizes: [1, 2], old: x}\n")
    one = Config.from_file(path)
    other = Config.from_file(path, ["optim.lr=3e-3", "model.sizes=[1, 3]", "model.new=true", "batch.global=128"])
    assert config_changes(one, one) == []
    assert config_changes(one, other) == [
        "batch.global: 64 → 128",
        "optim.lr: 0.001 → 0.003",
        "model.sizes: [1, 2] → [1, 3]",
        "model.new: (absent) → true",
    ]
    assert config_changes(other, one)[-1] == "model.new: true → (absent)"
