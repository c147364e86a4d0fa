"""Overrides and bases: how they are merged, and where each value came from."""

from pathlib import Path

import pytest

from lockstep.config.config_errors import MAX_PROBLEMS
from lockstep.config.config_file import MAX_BASES, read_config
from lockstep.config.located_value import Plain
from lockstep.config.train_schema import Config
from lockstep.config.yaml_document import MAX_DEPTH
from lockstep.errors import ConfigError
from tests.unit.config.config_problems import VALID, Write, problems_of

NOT_A_BASE = "expected the name of a built-in config, or a file that ends in .yaml, .yml, .json"


def refusal(path: Path, overrides: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_config(path, overrides)
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("override", "values"),
    [
        ("optim.lr=1e-3", {"optim": {"lr": 1e-3, "name": "sgd"}}),
        ("optim.betas=[0.9, 0.99]", {"optim": {"lr": 1, "name": "sgd", "betas": [0.9, 0.99]}}),
        ("optim={lr: 2}", {"optim": {"lr": 2, "name": "sgd"}}),
        ("optim=null", {"optim": None}),
        ("optim.lr.deep=1", {"optim": {"lr": {"deep": 1}, "name": "sgd"}}),
        ("data.path=/x", {"data": {"path": "/x"}}),
        ("name=no", {"name": "no"}),
        ("flag=true", {"flag": True}),
        ("name=", {"name": None}),
        ('name=""', {"name": ""}),
        ("name=a=b", {"name": "a=b"}),
        (" name = 3", {"name": 3}),
    ],
)
def test_override_is_read_as_the_file_is(write: Write, override: str, values: dict[str, Plain]) -> None:
    draft = read_config(write("optim: {lr: 1, name: sgd}"), [override])
    assert draft.values == {"optim": {"lr": 1, "name": "sgd"}} | values


def test_later_override_wins_and_origins_are_kept(write: Write) -> None:
    draft = read_config(write("a: 1\nb:\n  c: 2\n"), ["a=3", "a=4", "b.d=5"])
    assert draft.values == {"a": 4, "b": {"c": 2, "d": 5}}
    assert draft.origin("a") == draft.origin("b.d") == "command line"
    assert draft.origin("b.c") == "run.yaml:3"
    assert draft.origin("absent") == "run.yaml"


def test_malformed_overrides_are_reported_together(write: Write) -> None:
    overrides = ("lr", "=3", "a..b=hunter2", ".a=1", "x=#fff", "q=]", "base=other.yaml", "a.b=!foo 1")
    assert refusal(write(VALID), overrides) == [
        "command line: 'lr': expected key=value, as in optim.lr=1e-3",
        "command line: '=…': expected key=value, as in optim.lr=1e-3",
        "command line: 'a..b=…': expected key=value, as in optim.lr=1e-3",
        "command line: '.a=…': expected key=value, as in optim.lr=1e-3",
        "command line: x: YAML reads the value as a comment; put it in quotes",
        "command line: q: not valid YAML: expected the node content, but found ']' while parsing a block node",
        "command line: base: can only be set in a file",
        "command line: a.b: the tag !… is not allowed; a config holds plain values only",
    ]


def test_overrides_and_file_are_reported_together(write: Write) -> None:
    assert refusal(Path("absent.yaml"), ("lr",)) == [
        "absent.yaml: no such file",
        "command line: 'lr': expected key=value, as in optim.lr=1e-3",
    ]


def test_override_cannot_nest_deeper_than_a_file(write: Write) -> None:
    path = write(VALID)
    half = MAX_DEPTH // 2
    for override in (
        ".".join(["a"] * (MAX_DEPTH + 1)) + "=1",
        ".".join(["a"] * (half + 1)) + "=" + "[" * half + "1" + "]" * half,
    ):
        (problem,) = refusal(path, (override,))
        assert problem.endswith(f"nested deeper than {MAX_DEPTH} levels")


def test_a_file_overrides_its_base(write: Write, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    write("epochs: 1\noptim:\n  lr: 1\n  name: sgd\ntags: [a, b]\n", "shared/far.yaml")
    write("base: far.yaml\noptim: {lr: 2}\nseed: 7\n", "shared/near.yaml")
    draft = read_config(write("base: shared/near.yaml\nseed: 8\ntags: [c]\n"), ["optim.lr=3"])
    assert draft.values == {"epochs": 1, "optim": {"lr": 3, "name": "sgd"}, "tags": ["c"], "seed": 8}
    assert draft.origin("optim.name") == "shared/far.yaml:4"
    assert draft.origin("seed") == "run.yaml:2"
    assert draft.origin("absent") == "run.yaml"


def test_base_may_be_a_built_in_config(write: Write) -> None:
    digits = write("epochs: 5\nseed: 1\n", "somewhere.yaml")
    write("seed: 3\n", "near.yaml")
    builtins = {"digits": digits}
    assert read_config(write("base: near.yaml\n"), builtin=builtins.get).values == {"seed": 3}
    path = write("base: digits\nseed: 2\n")
    assert read_config(path, builtin=builtins.get).values == {"epochs": 5, "seed": 2}
    assert refusal(path) == [f"run.yaml:1: base: {NOT_A_BASE}; got 'digits'"]


def test_base_null_is_no_base(write: Write) -> None:
    assert read_config(write("base: null\na: 1\n")).values == {"a": 1}


@pytest.mark.parametrize("base", ["3", "[a.yaml]", "''", "secrets", "../../etc/shadow", "a.yaml/secrets"])
def test_base_must_be_a_name_or_a_config_file(write: Write, base: str) -> None:
    """Not any file: the messages about unknown keys would print its lines."""
    write("root:*:1234::\n", "secrets")
    (problem,) = refusal(write(f"base: {base}\n"))
    assert problem.startswith(f"run.yaml:1: base: {NOT_A_BASE}; got ")


def test_base_cannot_refer_to_the_environment(write: Write) -> None:
    (problem,) = refusal(write("base: ${HOME}/a.yaml\n"))
    assert problem.startswith("run.yaml:1: base: ${HOME} is not replaced here: only fields of type Private ")


def test_cycle_of_bases_is_refused(write: Write) -> None:
    write("base: ./run.yaml\n", "other.yaml")
    path = write("a: 1\nbase: other.yaml\n")
    assert refusal(path) == [
        "other.yaml:1: base: a config cannot build on itself: run.yaml → other.yaml → run.yaml",
    ]
    assert "run.yaml → run.yaml" in refusal(write("base: run.yaml\n"))[0]


def test_chain_of_bases_is_bounded(write: Write) -> None:
    write("a: 1\n", "0.yaml")
    for number in range(1, MAX_BASES + 2):
        write(f"base: {number - 1}.yaml\n", f"{number}.yaml")
    assert read_config(f"{MAX_BASES}.yaml").values == {"a": 1}
    assert refusal(Path(f"{MAX_BASES + 1}.yaml")) == ["1.yaml:1: base: more than 8 bases in a chain"]


def test_fault_in_a_base_names_the_base(write: Write) -> None:
    write("optim:\n  lrr: 1\n", "other.yaml")
    assert problems_of(write("base: other.yaml\n" + VALID)) == [
        "other.yaml:2: optim.lrr: unknown key; did you mean optim.lr?"
    ]


def test_only_the_first_problems_of_a_wrong_file_are_shown(write: Write) -> None:
    problems = problems_of(write(VALID + "".join(f"zzz{number}: 1\n" for number in range(MAX_PROBLEMS * 2))))
    assert problems[0] == "run.yaml:4: zzz0: unknown key"
    assert len(problems) == MAX_PROBLEMS + 1
    assert problems[-1] == f"only the first {MAX_PROBLEMS} problems are shown"


def test_from_file_reads_and_validates(write: Write) -> None:
    class Mine(Config):
        width: int = 3

    config = Mine.from_file(write(VALID), ["optim.lr=3e-4", "width=4"])
    assert isinstance(config, Mine)
    assert (config.optim.lr, config.width, config.batch.global_batch) == (3e-4, 4, 64)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), (3, None, 64, None)),
        (("steps=5",), (None, 5, 64, None)),
        (("epochs=5",), (5, None, 64, None)),
        (("batch.per_device=8",), (3, None, None, 8)),
        (("steps=5", "batch.per_device=8"), (None, 5, None, 8)),
    ],
)
def test_an_override_replaces_the_alternative_key_of_the_file(
    write: Write, overrides: tuple[str, ...], expected: tuple[int | None, ...]
) -> None:
    path = write("recipe: x\nepochs: 3\nsteps: null\nbatch: {global: 64}\n")
    config = read_config(path, overrides).check(Config)
    assert (config.epochs, config.steps, config.batch.global_batch, config.batch.per_device) == expected


def test_both_alternative_keys_at_once_are_refused(write: Write) -> None:
    path = write("recipe: x\nepochs: 3\nbatch: {global: 64}\n")
    with pytest.raises(ConfigError, match="give exactly one of epochs and steps"):
        read_config(path, ["epochs=3", "steps=5"]).check(Config)
    both = write("recipe: x\nepochs: 3\nsteps: 4\nbatch: {global: 64}\n", "both.yaml")
    with pytest.raises(ConfigError, match="give exactly one of epochs and steps"):
        read_config(both).check(Config)


def test_a_file_replaces_the_alternative_key_of_its_base(write: Write) -> None:
    write("recipe: x\nepochs: 3\nbatch: {global: 64}\n", "base.yaml")
    config = read_config(write("base: base.yaml\nsteps: 7\n")).check(Config)
    assert (config.epochs, config.steps) == (None, 7)
