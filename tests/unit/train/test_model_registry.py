"""Models by name."""

from collections.abc import Iterator
from functools import partial

import pytest
from torch import nn

from lockstep.errors import UserError
from lockstep.train import model_registry
from lockstep.train.model_registry import register_model, registered_model


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(model_registry, "_models", {})
    return


def test_a_class_and_a_function_are_found_by_name() -> None:
    @register_model("vae")
    class VAE(nn.Linear):
        def __init__(self, config: dict[str, int]) -> None:
            super().__init__(config["width"], 1)

    @register_model("small")
    def make(config: object) -> nn.Module:
        return nn.Identity()

    assert registered_model("vae")({"width": 3}).in_features == 3
    assert isinstance(registered_model("small")(None), nn.Identity)
    assert register_model("vae")(VAE) is VAE, "a module may be imported twice"


def test_a_name_can_be_registered_once() -> None:
    register_model("vae")(nn.Linear)
    with pytest.raises(UserError, match=r"the name vae is taken by torch.nn.modules.linear.Linear"):
        register_model("vae")(nn.Identity)


def test_an_unknown_name_gets_a_suggestion_or_the_list() -> None:
    with pytest.raises(UserError, match="no model is registered as 'vae'; known: none"):
        registered_model("vae")
    register_model("resnet50")(nn.Identity)
    with pytest.raises(UserError, match="did you mean resnet50"):
        registered_model("resnet5")
    with pytest.raises(UserError, match="known: resnet50"):
        registered_model("unet")


def test_a_notebooks_cell_may_be_run_again() -> None:
    def cell() -> type[nn.Module]:
        @register_model("net")
        class Net(nn.Module):
            pass

        return Net

    cell()
    latest = cell()
    assert registered_model("net") is latest


def test_objects_without_a_name_can_be_registered() -> None:
    register_model("eight")(partial(nn.Linear, 8))
    assert registered_model("eight")(3).in_features == 8
    with pytest.raises(UserError, match=r"the name eight is taken by functools.partial\(.*Linear"):
        register_model("eight")(nn.Identity)
    register_model("small")(lambda: nn.Linear(1, 1))
    with pytest.raises(UserError, match=r"the name small is taken by <function .*lambda"):
        register_model("small")(lambda: nn.Linear(2, 2))
