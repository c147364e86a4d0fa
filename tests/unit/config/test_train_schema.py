"""The training config: its defaults, and the rules between its keys."""

import pytest

from lockstep.config.duration import Duration
from lockstep.config.field_types import ConfigSection, Frozen, PositiveInt
from lockstep.config.resolved_config import config_digest, dump_config
from lockstep.config.train_schema import BatchConfig, Config, GroupConfig, OptimConfig, ScheduleConfig
from tests.unit.config.config_problems import VALID, Write, problems_of


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
        model=ConfigSection(),
        data=ConfigSection(),
    )


def test_empty_file_lacks_the_required_keys(write: Write) -> None:
    assert problems_of(write("")) == [
        "run.yaml: steps: give exactly one of epochs and steps",
        "run.yaml: batch: missing; expected a mapping with global, per_device",
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
        (
            ["accumulate=2"],
            "command line: accumulate: only valid with batch.per_device; with batch.global, set lanes instead",
        ),
        (["evaluate_every=0 steps"], "command line: evaluate_every: expected a duration greater than 0, got 0 steps"),
    ],
)
def test_rules_between_keys(write: Write, overrides: list[str], problem: str) -> None:
    assert problems_of(write(VALID), overrides) == [problem]


def test_steps_and_per_device_instead(write: Write) -> None:
    config = Config.from_file(write("recipe: digits\nsteps: 1e3\nbatch: {per_device: 8}\n"))
    assert (config.epochs, config.steps, config.batch.global_batch, config.batch.per_device) == (None, 1000, None, 8)


def test_file_knows_a_field_by_its_alias_only(write: Write) -> None:
    assert problems_of(write("recipe: digits\nepochs: 3\nbatch: {global_batch: 64}\n")) == [
        "run.yaml:3: batch.per_device: give exactly one of global and per_device",
        "run.yaml:3: batch.global_batch: unknown key; did you mean batch.global?",
    ]


def test_recipe_narrows_a_section_to_its_own_class(write: Write) -> None:
    class Model(Frozen):
        width: PositiveInt = 8

    class Mine(Config):
        model: Model = Model()

    path = write(VALID)
    assert Mine.from_file(path, ["model.width=16"]).model == Model(width=16)
    assert problems_of(path, ["model.widht=16"], Mine) == [
        "command line: model.widht: unknown key; did you mean model.width?"
    ]
    assert problems_of(path, ["model=16"], Mine) == ["command line: model: expected a mapping with width, got 16"]


def test_schedule_takes_steps_epochs_and_samples(write: Write) -> None:
    text = "schedule: {kind: step, warmup: 5e2, length: 0.50 epochs, every: 1e6 samples, factor: 0.5}\n"
    config = Config.from_file(write(VALID + text))
    schedule = config.schedule
    assert list(map(str, (schedule.warmup, schedule.length, schedule.every))) == [
        "500 steps",
        "0.5 epochs",
        "1000000 samples",
    ]
    assert Config.from_file(write(dump_config(config))) == config
    same = Config.from_file(write(VALID + text), ["schedule.warmup=500 steps", "schedule.length=.5 epoch"])
    assert config_digest(same) == config_digest(config)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "schedule.warmup=5 weeks",
            "schedule.warmup: expected a duration, as in 500 steps, 2 epochs or 1e6 samples, got '5 weeks'",
        ),
        ("schedule.warmup=1.5 steps", "schedule.warmup: expected a whole number of steps, got '1.5 steps'"),
        ("schedule.length=0 epochs", "schedule.length: expected a duration greater than 0, got 0 epochs"),
        ("schedule={kind: step}", "schedule.every: kind: step needs a duration, as in 30 epochs"),
        ("schedule={kind: step, every: 0}", "schedule.every: expected a duration greater than 0, got 0 steps"),
        ("schedule.factor=2", "schedule.factor: expected a number greater than 0 and at most 1, got 2"),
        ("schedule.final=-1", "schedule.final: expected a number of at least 0, got -1"),
        (
            "schedule.kind=cosin",
            "schedule.kind: expected one of constant, linear, cosine, step, got 'cosin'; did you mean cosine?",
        ),
        (
            "optim.lr_scaling=linear",
            "optim.base_batch: lr_scaling: linear needs the global batch that lr was tuned for",
        ),
        ("optim={nesterov: true, momentum: 0}", "optim.nesterov: needs a momentum greater than 0"),
        ("threads=2000", "threads: expected a whole number from 1 to 1024, got 2000"),
        ("lanes=3", "lanes: expected auto or a power of two, got 3"),
        ("lanes=autoo", "lanes: expected auto or a power of two, got 'autoo'"),
        ("lanes=1e30", "lanes: expected a whole number below 2⁶³, got 1e+30"),
        ("optim.betas=[0.9]", "optim.betas: expected a list of 2 values, got 1 value"),
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


@pytest.mark.parametrize(
    ("given", "name"), [("SGD", "sgd"), ("AdamW", "adamw"), ("RMSprop", "RMSprop"), ("m:C", "m:C")]
)
def test_an_optimizer_is_named_by_its_class(given: str, name: str) -> None:
    assert OptimConfig(name=given).name == name


@pytest.mark.parametrize("name", ["a-b", "torch.optim.SGD", "module:", ":Class", "a:b:c", "a b", ""])
def test_a_name_that_can_be_no_optimizers_is_refused_without_an_import(write: Write, name: str) -> None:
    (problem,) = problems_of(write(VALID), [f"optim.name={name!r}"])
    expected = "expected sgd, adam, adamw, a class of torch.optim, or package.module:Class"
    assert problem == f"command line: optim.name: {expected}, got {name!r}"


def test_settings_of_another_optimizer_are_refused(write: Write) -> None:
    assert problems_of(write(VALID), ["optim.name=NAdam", "optim.betas=[0.8, 0.9]", "optim.momentum=0.5"]) == [
        "command line: optim.momentum: only for sgd: for NAdam, write optim.arguments.momentum",
        "command line: optim.betas: only for adam and adamw: for NAdam, write optim.arguments.betas",
    ]


def test_a_config_with_another_optimizer_reads_back_as_itself(write: Write) -> None:
    config = Config.from_file(write(VALID), ["optim.name=NAdam", "optim.arguments={betas: [0.8, 0.9], eps: 1e-6}"])
    text = dump_config(config)
    assert "momentum" not in text
    assert Config.from_file(write(text)) == config
    assert dump_config(Config.from_file(write(dump_config(Config.from_file(write(VALID)))))).count("momentum") == 1


def test_another_optimizer_does_not_inherit_the_arguments_of_the_former(write: Write) -> None:
    write("optim: {name: adamw, betas: [0.8, 0.9], lr: 0.5, arguments: {amsgrad: true}}\n" + VALID, "base.yaml")
    path = write("base: base.yaml\n")
    other = Config.from_file(path, ["optim.name=NAdam"]).optim
    assert (other.lr, other.betas, other.arguments) == (0.5, (0.9, 0.999), ConfigSection())
    similar = Config.from_file(path, ["optim.name=adam"]).optim
    assert (similar.betas, similar.arguments) == ((0.8, 0.9), ConfigSection())
    same = Config.from_file(path, ["optim.name=AdamW"]).optim
    assert same.arguments == ConfigSection(amsgrad=True)
    write("optim: {arguments: {amsgrad: true}}\n" + VALID, "base.yaml")  # of the default one, adamw
    assert Config.from_file(path, ["optim.name=adamw"]).optim.arguments == ConfigSection(amsgrad=True)
    assert Config.from_file(path, ["optim.name=adam"]).optim.arguments == ConfigSection()


def test_the_number_of_workers_is_bounded(write: Write) -> None:
    assert Config.from_file(write(f"{VALID}workers: 256\n")).workers == 256
    (problem,) = problems_of(write(f"{VALID}workers: 100000\n"))
    assert problem.endswith("workers: expected a whole number from 0 to 256, got 100000")
