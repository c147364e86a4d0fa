"""Optimizers: groups by name, a rate that follows the batch, and all of the config's settings where they belong."""

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.config.train_schema import GroupConfig, OptimConfig
from lockstep.errors import UserError
from lockstep.train.optim.optimizer_factory import GroupRule, build_optimizer, parameter_groups, scaled_lr


class Net(nn.Module):
    """Has two names for one parameter, and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 3)
        self.head.weight = self.embed.weight


def named(model: nn.Module, groups: list[dict[str, Any]]) -> list[list[str]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [[names[parameter] for parameter in group["params"]] for group in groups]


def test_without_rules_there_is_one_group_of_all_that_is_trainable() -> None:
    model = Net()
    groups = parameter_groups(model, [], lr=0.1)
    assert named(model, groups) == [
        ["embed.weight", "body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "head.bias"]
    ]
    assert groups[0].keys() == {"params", "lr"}


def test_the_first_matching_rule_wins_and_the_rest_come_last() -> None:
    model = Net()
    rules: list[GroupRule] = [
        {"match": "body.1.*", "lr_factor": 0.5},
        {"match": "*.bias", "weight_decay": 0.0},
        {"match": "body.?.weight", "lr_factor": 2.0, "weight_decay": 0.3},
    ]
    groups = parameter_groups(model, rules, lr=0.1)
    assert named(model, groups) == [
        ["body.1.weight", "body.1.bias"],
        ["body.0.bias", "head.bias"],
        ["body.0.weight"],
        ["embed.weight"],
    ]
    settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    assert settings == [{"lr": 0.05}, {"lr": 0.1, "weight_decay": 0.0}, {"lr": 0.2, "weight_decay": 0.3}, {"lr": 0.1}]


def test_rules_that_take_all_leave_no_empty_group() -> None:
    groups = parameter_groups(nn.Linear(2, 2), [{"match": "*"}], lr=0.1)
    assert len(groups) == 1
    torch.optim.SGD(groups)


def test_a_tied_parameter_occurs_once_and_matches_by_any_of_its_names() -> None:
    model = Net()
    groups = parameter_groups(model, [{"match": "head.*", "lr_factor": 0.1}], lr=1.0)
    assert named(model, groups)[0] == ["embed.weight", "head.bias"]
    assert sum(len(group["params"]) for group in groups) == 6


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        ([{"match": "*.biass"}], r"'\*\.biass' matches no trainable parameter; the nearest is head.bias$"),
        ([{"match": "hed.weight"}], "'hed.weight' matches no trainable parameter; the nearest is head.weight$"),
        ([{"match": "HEAD.*"}], r"'HEAD\.\*' matches no trainable parameter; the nearest is "),
        ([{"match": "frozen.*"}], r"'frozen\.\*' matches only frozen parameters, such as frozen.weight"),
        (
            [{"match": "*"}, {"match": "*.bias"}],
            r"'\*\.bias' has nothing left to match: earlier rules take body.0.bias",
        ),
        ([{"match": "*"}, {"mach": "*"}], "rule 2: expected the keys match, lr_factor, weight_decay, got 'mach'"),
        ([{"match": "*", "weight_deacy": 0.0}], "rule 1: expected the keys .*, got 'weight_deacy'"),
        ([{"lr_factor": 0.1}], "rule 1: needs match="),
        ([{"match": "*", "lr_factor": -1.0}], "rule 1: lr_factor=-1.0: expected a number of at least 0"),
        ([{"match": "*", "weight_decay": float("nan")}], "rule 1: weight_decay=nan: expected a number of at least 0"),
    ],
)
def test_a_rule_without_effect_is_an_error(rules: Any, problem: str) -> None:
    with pytest.raises(UserError, match=f"^parameter groups: {problem}") as caught:
        parameter_groups(Net(), rules, lr=0.1)
    assert "\n" not in str(caught.value)


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(UserError, match="no trainable parameter: set requires_grad=True on those to train"):
        parameter_groups(nn.Linear(2, 2).requires_grad_(False), [], lr=0.1)


@pytest.mark.parametrize(("rule", "lr"), [("none", 0.3), ("linear", 1.2), ("sqrt", 0.6)])
def test_the_rate_follows_the_batch(rule: Any, lr: float) -> None:
    assert scaled_lr(0.3, 256, 64, rule) == pytest.approx(lr, rel=1e-15)


@pytest.mark.parametrize("rule", ["none", "linear", "sqrt"])
@pytest.mark.parametrize("batch", [1, 3, 7, 49, 96, 1000])
def test_at_the_base_batch_the_rate_is_untouched(rule: Any, batch: int) -> None:
    for lr in (1e-3, 0.1, 0.3, 3e-4):
        assert scaled_lr(lr, batch, batch, rule) == lr


def test_scaling_without_a_base_or_by_an_unknown_rule_is_an_error() -> None:
    assert scaled_lr(0.1, 64, None, "none") == 0.1
    with pytest.raises(
        UserError, match=r"^learning-rate scaling linear needs base_batch, the batch that lr=0.1 was tuned at"
    ):
        scaled_lr(0.1, 64, None, "linear")
    with pytest.raises(UserError, match=r"^learning-rate scaling sqrt needs base_batch.* got 0$"):
        scaled_lr(0.1, 64, 0, "sqrt")
    with pytest.raises(UserError, match="expected one of none, linear, sqrt, got 'square'"):
        scaled_lr(0.1, 64, 32, "square")  # type: ignore[arg-type]


ADAM = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.02, "lr": 0.05}
SGD = {"momentum": 0.7, "nesterov": True, "weight_decay": 0.02, "lr": 0.05}


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("sgd", torch.optim.SGD, SGD),
        ("adam", torch.optim.Adam, ADAM),
        ("adamw", torch.optim.AdamW, ADAM),
    ],
)
def test_every_setting_of_the_config_arrives(name: Any, kind: type, settings: dict[str, Any]) -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), OptimConfig.model_validate({"name": name, **settings}), 64)
    assert type(optimizer) is kind
    (group,) = optimizer.param_groups
    assert {key: group[key] for key in settings} == settings


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_the_configs_defaults_are_torchs(name: Any) -> None:
    """So a config without settings trains as a plain call of the optimizer does."""
    kind: Any = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    extra = {"momentum": 0.9} if name == "sgd" else {}
    ours = build_optimizer(nn.Linear(2, 2), OptimConfig(name=name), 64).param_groups[0]
    theirs = kind(nn.Linear(2, 2).parameters(), lr=1e-3, weight_decay=0.0, **extra).param_groups[0]
    assert {**ours, "params": None} == {**theirs, "params": None}


def test_an_optimizer_of_torch_is_made_with_its_arguments() -> None:
    optim = OptimConfig.model_validate(
        {"name": "rmsprop", "lr": 0.05, "weight_decay": 0.1, "arguments": {"alpha": 0.8, "centered": True}}
    )
    optimizer = build_optimizer(nn.Linear(2, 2), optim, 64)
    assert type(optimizer) is torch.optim.RMSprop
    (group,) = optimizer.param_groups
    expected = {"lr": 0.05, "weight_decay": 0.1, "alpha": 0.8, "centered": True, "momentum": 0}
    assert {key: group[key] for key in expected} == expected


def test_a_known_optimizer_takes_further_arguments() -> None:
    optim = OptimConfig.model_validate({"name": "AdamW", "betas": [0.8, 0.9], "arguments": {"amsgrad": True}})
    (group,) = build_optimizer(nn.Linear(2, 2), optim, 64).param_groups
    assert (group["betas"], group["amsgrad"]) == ((0.8, 0.9), True)


def test_what_an_optimizer_says_of_a_value_is_one_line() -> None:
    optim = OptimConfig.model_validate({"name": "Muon"})
    with pytest.raises(UserError, match=r"^optim: Muon: Muon only supports 2D parameters"):
        build_optimizer(nn.Linear(2, 2), optim, 64)


def test_a_wrong_argument_of_a_config_made_in_python_is_named() -> None:
    optim = OptimConfig.model_validate({"name": "NAdam", "arguments": {"momentum_decai": 1e-3}})
    with pytest.raises(UserError, match=r"^optim.arguments.momentum_decai: NAdam has no argument .*momentum_decay\?$"):
        build_optimizer(nn.Linear(2, 2), optim, 64)


def test_scaling_and_groups_of_the_config_arrive() -> None:
    optim = OptimConfig(
        lr=0.1,
        lr_scaling="sqrt",
        base_batch=16,
        weight_decay=0.5,
        groups=(GroupConfig(match="bias", lr_factor=0.1, weight_decay=0.0), GroupConfig(match="weigh?")),
    )
    groups = build_optimizer(nn.Linear(2, 2), optim, 64).param_groups
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [
        (pytest.approx(0.02), 0.0),
        (pytest.approx(0.2), 0.5),
    ]


def test_groups_train_at_their_own_rates() -> None:
    model = nn.Linear(1, 1)
    optim = OptimConfig(name="sgd", lr=0.1, momentum=0.0, groups=(GroupConfig(match="bias", lr_factor=10.0),))
    optimizer = build_optimizer(model, optim, 64)
    before = [model.weight.item(), model.bias.item()]
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert model.weight.item() == pytest.approx(before[0] - 0.1)
    assert model.bias.item() == pytest.approx(before[1] - 1.0)
