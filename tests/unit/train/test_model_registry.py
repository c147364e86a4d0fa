"""Models by name."""

from collections.abc import Iterator

import pytest
from torch import nn

from lockstep.errors import UserError
from lockstep.train import model_registry
from lockstep.train.model_registry import get_model, register_model


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

    assert get_model("vae")({"width": 3}).in_features == 3
    assert isinstance(get_model("small")(None), nn.Identity)
    assert register_model("vae")(VAE) is VAE, "a module may be imported twice"


def test_a_name_is_taken_once() -> None:
    register_model("vae")(nn.Linear)
    with pytest.raises(UserError, match=r"the name vae is taken by torch.nn.modules.linear.Linear"):
        register_model("vae")(nn.Identity)


def test_an_unknown_name_brings_the_nearest_or_all() -> None:
    with pytest.raises(UserError, match="no model is registered as 'vae'; known: none"):
        get_model("vae")
    register_model("resnet50")(nn.Identity)
    with pytest.raises(UserError, match="did you mean resnet50"):
        get_model("resnet5")
    with pytest.raises(UserError, match="known: resnet50"):
        get_model("unet")
