"""Models in torch.compile's wrappers have the names of the bare model."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lockstep.engine.compiled_models import (
    is_compiled,
    load_state_by_name,
    named_buffers,
    named_modules,
    named_parameters,
    state_by_name,
    uncompiled,
    without_wrapper_names,
)


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 3), nn.Dropout()))


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def inside(model: nn.Sequential) -> nn.Module:
    model[2] = compiled(model[2])
    return model


def at_each_level(model: nn.Sequential) -> nn.Module:
    model[2][0] = compiled(model[2][0])  # type: ignore[index,operator]
    return compiled(inside(model))


def in_place(model: nn.Sequential) -> nn.Module:
    model.compile(backend="eager")
    return model


WAYS = [compiled, inside, at_each_level, in_place]


@pytest.mark.parametrize("way", WAYS)
def test_all_names_are_those_of_the_bare_model(way: Callable[[nn.Sequential], nn.Module]) -> None:
    bare, wrapped = make_model(), way(make_model())
    assert list(state_by_name(wrapped)) == list(bare.state_dict())
    assert [name for name, _ in named_parameters(wrapped)] == [name for name, _ in bare.named_parameters()]
    assert [name for name, _ in named_buffers(wrapped)] == [name for name, _ in bare.named_buffers()]
    assert [(name, type(m)) for name, m in named_modules(wrapped)] == [(n, type(m)) for n, m in bare.named_modules()]


@pytest.mark.parametrize("way", WAYS)
def test_a_state_loads_into_the_wrapped_model(way: Callable[[nn.Sequential], nn.Module]) -> None:
    bare, wrapped = make_model(), way(make_model())
    load_state_by_name(wrapped, bare.state_dict())
    loaded = state_by_name(wrapped)
    assert all(torch.equal(loaded[name], value) for name, value in bare.state_dict().items())


def test_which_models_are_compiled() -> None:
    assert [is_compiled(way(make_model())) for way in WAYS] == [True] * len(WAYS)
    assert not is_compiled(make_model())


def test_the_bare_model_is_inside() -> None:
    model = make_model()
    assert uncompiled(model) is uncompiled(compiled(model)) is model


def test_a_module_that_the_author_called_like_the_wrappers_child_keeps_its_name() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = nn.Linear(2, 2)
            self.weight = nn.Parameter(torch.zeros(2))

    assert (
        list(state_by_name(compiled(Own())))
        == list(Own().state_dict())
        == ["weight", "_orig_mod.weight", "_orig_mod.bias"]
    )


@pytest.mark.parametrize(
    ("saved", "plain"),
    [
        ("_orig_mod.0._orig_mod.weight", "0.weight"),
        ("blocks.0.weight", "blocks.0.weight"),
        ("_orig_mod._orig_mod", "_orig_mod"),  # a parameter of this name
    ],
)
def test_saved_names_lose_what_the_compiler_inserts(saved: str, plain: str) -> None:
    assert without_wrapper_names(saved) == plain
