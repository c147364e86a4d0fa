"""The optimizers that a config may name, and what is said of the others and of wrong arguments."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from lockstep.config.train_schema import OptimConfig
from lockstep.errors import UserError
from lockstep.train.optim.optimizer_classes import find_optimizer, optimizer_problems, require_no_closure

OWN = """
import torch

class Signed(torch.optim.Optimizer):
    def __init__(self, params, lr, scale, *, decay=0.0):
        super().__init__(params, {"lr": lr, "scale": scale, "decay": decay})

class Anything(torch.optim.SGD):
    def __init__(self, params, **options):
        super().__init__(params, **options)

class WithoutRate(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_optimizers.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


def problems(**settings: Any) -> list[tuple[str, str]]:
    return list(optimizer_problems(OptimConfig.model_validate(settings)))


def test_every_optimizer_of_torch_is_found_or_refused_with_a_reason() -> None:
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)]
    refused = {}
    for kind in set(kinds) - {Optimizer}:
        try:
            assert find_optimizer(kind.__name__) is find_optimizer(kind.__name__.lower()) is kind
        except UserError as error:
            refused[kind.__name__] = str(error)
    assert refused.keys() == {"LBFGS", "SparseAdam"}
    assert "several times in a step" in refused["LBFGS"]
    assert "sparse gradients only" in refused["SparseAdam"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("adamm", "torch.optim has no optimizer 'adamm'; did you mean adam?"),
        ("RMSProb", "torch.optim has no optimizer 'RMSProb'; did you mean RMSprop?"),
        ("Optimizer", "torch.optim has no optimizer 'Optimizer': expected one of Adadelta, "),
        ("no_such_module:Lion", "no_such_module:Lion: ModuleNotFoundError: No module named 'no_such_module'"),
        ("json:dumps", "json:dumps is not a subclass of torch.optim.Optimizer"),
    ],
)
def test_an_unknown_optimizer_is_named(name: str, says: str) -> None:
    ((key, problem),) = problems(name=name)
    assert key == "name"
    assert problem.startswith(says)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"name": "RMSprop", "arguments": {"alpha": 0.9}}, []),
        (
            {"name": "RMSprop", "arguments": {"alhpa": 0.9}},
            [("arguments.alhpa", "RMSprop has no argument alhpa; did you mean alpha?")],
        ),
        ({"name": "RMSprop", "arguments": {"lr": 0.9}}, [("arguments.lr", "write optim.lr instead")]),
        ({"name": "sgd", "arguments": {"momentum": 0.9}}, [("arguments.momentum", "write optim.momentum instead")]),
        ({"name": "Rprop", "weight_decay": 0.1}, [("weight_decay", "Rprop has no weight decay: set it to 0")]),
        (
            {"name": "Rprop", "groups": [{"match": "*", "weight_decay": 0.1}]},
            [("groups[0].weight_decay", "Rprop has no weight decay: omit it")],
        ),
    ],
)
def test_arguments_are_checked_against_the_constructor(settings: Any, found: Any) -> None:
    assert problems(**settings) == found


@pytest.mark.usefixtures("own")
def test_a_class_of_a_module_is_found_and_its_arguments_are_checked() -> None:
    assert find_optimizer("own_optimizers:Signed").__name__ == "Signed"
    signed = "own_optimizers:Signed"
    assert problems(name=signed, arguments={"scale": 2.0, "decay": 0.5}) == []
    assert problems(name=signed) == [("arguments", "Signed also needs scale")]
    assert problems(name=signed, arguments={"scale": 1, "params": 2}) == [
        ("arguments.params", "Signed has no argument params; it has scale, decay")
    ]
    assert problems(name="own_optimizers:Anything", weight_decay=0.1, arguments={"dampening": 0.1}) == []
    ((key, problem),) = problems(name="own_optimizers:WithoutRate")
    assert (key, problem) == (
        "name",
        "WithoutRate has no argument lr: use an optimizer whose learning rate can be set",
    )


def test_an_optimizer_that_calls_the_model_itself_is_refused() -> None:
    class Closure(torch.optim.SGD):
        def step(self, closure: Any) -> Any:
            return super().step(closure)

    with pytest.raises(UserError, match="Closure evaluates the loss several times in a step"):
        require_no_closure(Closure)
    require_no_closure(torch.optim.SGD)
