"""YAML files: plain values only, YAML 1.2's scalars, and one clear line for everything that is refused."""

import ast
import math
import os
from pathlib import Path

import pytest

import lockstep.config
from lockstep.config import yaml_document
from lockstep.config.located_value import Plain
from lockstep.config.yaml_document import MAX_CONFIG_BYTES, MAX_DEPTH, parse_yaml_mapping, read_yaml_text
from lockstep.errors import ConfigError


def values(text: str) -> Plain:
    return parse_yaml_mapping(text, "run.yaml").plain()


def refusal(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_yaml_mapping(text, "run.yaml")
    assert all(problem.isprintable() for problem in caught.value.problems)
    return list(caught.value.problems)


def unreadable(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_yaml_text(path)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("word", "meaning"),
    [
        ("3e-4", 3e-4),
        ("1e6", 1e6),
        (".5", 0.5),
        ("5.", 5.0),
        ("-1.5E+3", -1500.0),
        ("-.inf", -math.inf),
        ("12", 12),
        ("-007", -7),
        ("0o17", 15),
        ("0xff", 255),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("2024-01-01", "2024-01-01"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("1e", "1e"),
        ("'3'", "3"),
        ("!!str 3", "3"),
        ("!!float 3", 3.0),
        ("[a, 1, {b: 2}]", ["a", 1, {"b": 2}]),
        ("&x [1]", [1]),
    ],
)
def test_scalars_follow_yaml_1_2(word: str, meaning: Plain) -> None:
    read = values(f"key: {word}")
    assert read == {"key": meaning}
    assert type(read["key"]) is type(meaning)


def test_nan_is_a_number() -> None:
    assert math.isnan(values("key: .nan")["key"])


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "\ufeff"])
def test_empty_file_is_an_empty_mapping(text: str) -> None:
    assert values(text) == {}


def test_every_value_knows_its_line() -> None:
    root = parse_yaml_mapping("a: 1\nb:\n  c:\n    - 2\n    - {d: 3}\n", "run.yaml")
    assert root.origin == "run.yaml"
    assert root.nearest(("a",)).origin == "run.yaml:1"
    assert root.nearest(("b", "c")).origin == "run.yaml:3"
    assert root.nearest(("b", "c", 1, "d")).origin == "run.yaml:5"


def test_alias_stands_for_its_value() -> None:
    assert values("a: &x {b: [1]}\nc: *x") == {"a": {"b": [1]}, "c": {"b": [1]}}


def test_python_tags_are_refused_and_nothing_runs(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    problems = refusal(f"a: 1\nb: !!python/object/apply:os.system ['touch {marker}']\n")
    assert problems == [
        "run.yaml:2: b: the tag !!python/object/apply:os.system is not allowed; a config holds plain values only"
    ]
    assert not marker.exists()


@pytest.mark.parametrize(
    "value", ["!foo 3", "!foo [1]", "!!set {a}", "!!binary aGk=", "!!timestamp 2024-01-01", "!!map 3"]
)
def test_other_tags_are_refused(value: str) -> None:
    (problem,) = refusal(f"key: {value}")
    assert problem.startswith("run.yaml:1: key: the tag !")


@pytest.mark.parametrize("value", ["!!int abc", "!!bool yes", "!!null 3", "!!float x"])
def test_core_tag_on_the_wrong_scalar_is_refused(value: str) -> None:
    (problem,) = refusal(f"key: {value}")
    assert problem.startswith("run.yaml:1: key: not a valid value for the tag !!")


def test_duplicate_key_names_both_lines() -> None:
    assert refusal("optim:\n  lr: 1\n  name: sgd\n  lr: 2\n") == [
        "run.yaml:4: optim.lr: duplicate key; first set on line 2"
    ]


@pytest.mark.parametrize("key", ["3", "1.5", "true", "null", "[a]", "{a: b}"])
def test_key_must_be_text(key: str) -> None:
    (problem,) = refusal(f"? {key}\n: value\n")
    assert problem.startswith("run.yaml:1: a key must be text, got ")


def test_merge_key_is_refused_with_the_remedy_and_quoted_is_ordinary() -> None:
    (problem,) = refusal("a: &a {x: 1}\nb:\n  <<: *a\n")
    assert problem.startswith("run.yaml:3: b: merge keys (<<)")
    assert "`base:`" in problem
    assert values("'<<': 1") == {"<<": 1}


def test_faults_of_values_are_found_together() -> None:
    problems = refusal("a: 1\na: 2\n3: 4\nb: !foo 1\n")
    assert [problem.split(": ")[0] for problem in problems] == ["run.yaml:2", "run.yaml:3", "run.yaml:4"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("--- {a: 1}\n--- {b: 2}\n", "run.yaml:2: a second YAML document starts here; a config is a single document"),
        ("- a\n- b\n", "run.yaml:1: expected `key: value` lines at the top level, got a list"),
        ("just text", "run.yaml:1: expected `key: value` lines at the top level, got a single value"),
        ("a: 1\nb: c: d\n", "run.yaml:2: not valid YAML: mapping values are not allowed here"),
        ('a: 1\nb: "\\UFFFFFFFF"', "run.yaml:2: not valid YAML: an escape sequence does not stand for a character"),
        ('a: "\\ud800"', "run.yaml:1: a: contains half of a surrogate pair, which is not a character"),
        ("a: 1\nb: \x07", "run.yaml:2: not valid YAML: character U+0007 is not allowed"),
        ("a: " + "9" * 500, "run.yaml:1: a: a number longer than 400 characters"),
        ("a: &a [*a]", "run.yaml:1: an alias refers to the value that contains it"),
        ("a: &a {b: {c: *a}}", "run.yaml:1: an alias refers to the value that contains it"),
        ("a: *hunter2", "run.yaml:1: not valid YAML: found undefined alias"),
    ],
)
def test_refused_with_one_line(text: str, problem: str) -> None:
    assert refusal(text) == [problem]


def test_alias_bomb_is_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 20)]
    assert refusal("\n".join(lines)) == ["run.yaml:1: more than 100,000 values once aliases are expanded"]


def test_too_many_values_are_refused_while_composing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_document, "MAX_NODES", 10)
    assert refusal("a: [1, 2]\nb: [3, 4, 5, 6, 7, 8]\n") == ["run.yaml:2: more than 10 values"]


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? "])
def test_deep_nesting_is_refused(opening: str) -> None:
    (problem,) = refusal(opening * 20_000)
    assert problem == f"run.yaml:1: nested deeper than {MAX_DEPTH} levels"


def test_deep_nesting_through_aliases_is_refused() -> None:
    lines = ["a0: &a0 [x]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, MAX_DEPTH + 1))]
    (problem,) = refusal("\n".join(lines))
    assert problem.endswith(f"nested deeper than {MAX_DEPTH} levels once aliases are expanded")


def test_nesting_up_to_the_bound_is_fine() -> None:
    depth = MAX_DEPTH - 1
    value = values(f"a: {'[' * depth}{']' * depth}")["a"]
    for _ in range(depth - 1):
        (value,) = value
    assert value == []


def test_binary_files_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    for content in (b"PK\x03\x04\x00\x00", b"\xff\xfea", "a: ü".encode("utf-16"), "a: ü".encode("latin-1")):
        path.write_bytes(content)
        assert unreadable(path).startswith(f"{path}: not a text file")


def test_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    path.write_bytes(b"#" * (MAX_CONFIG_BYTES + 1))
    assert unreadable(path) == f"{path}: larger than 1 MiB; too large for a config"
    path.write_bytes(b"#" * MAX_CONFIG_BYTES)
    assert len(read_yaml_text(path)) == MAX_CONFIG_BYTES


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert unreadable(tmp_path / "absent.yaml") == f"{tmp_path}/absent.yaml: no such file"
    assert unreadable(tmp_path) == f"{tmp_path}: a folder, not a file"
    os.mkfifo(tmp_path / "pipe.yaml")  # nothing waits for somebody to write into it
    assert unreadable(tmp_path / "pipe.yaml") == f"{tmp_path}/pipe.yaml: cannot be read: not a regular file"
    assert unreadable(Path("/dev/null")) == "/dev/null: cannot be read: not a regular file"
    assert unreadable(Path("a\0b")) == "a\\x00b: not a valid path"
    assert unreadable(tmp_path / ("x" * 300)).endswith(": cannot be read: File name too long")

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)  # a mode of 000 does not stop the superuser
    assert unreadable(tmp_path / "secret.yaml") == f"{tmp_path}/secret.yaml: cannot be read: Permission denied"


def test_package_imports_nothing_itself() -> None:
    """`import lockstep` reaches `config.environment` and must work without pydantic and PyYAML."""
    assert lockstep.config.__file__ is not None
    (docstring,) = ast.parse(Path(lockstep.config.__file__).read_text()).body
    assert isinstance(docstring, ast.Expr)
