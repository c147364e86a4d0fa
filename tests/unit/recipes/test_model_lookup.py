"""Models of built-in recipes by name, beside those that the user has registered."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.errors import ConfigError, UserError
from lockstep.recipes.gpt.transformer import GptNetwork
from lockstep.recipes.registry import default_config, load_recipe
from lockstep.recipes.vae.autoencoder import Autoencoder
from lockstep.train import model_registry


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_registry, "_models", {})


def test_a_model_that_carries_its_loss_by_name_from_a_config_file_in_three_lines() -> None:
    path = default_config("vae")
    assert path is not None
    pixels = torch.rand(96, 1, 8, 8)
    train_loader = DataLoader(TensorDataset(pixels, torch.arange(96)), batch_size=32, shuffle=True)
    val_loader = DataLoader(TensorDataset(pixels[:32], torch.arange(32)), batch_size=32)

    config = lockstep.Config.from_file(path, ["model.width=8"])
    model = lockstep.get_model("vae")(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    history = lockstep.Trainer(model, optimizer, device="cpu").train(train_loader, val_loader, epochs=2)

    assert isinstance(model, Autoencoder)
    assert [entry["epoch"] for entry in history] == [1, 2]
    assert history[1]["train_loss"] < history[0]["train_loss"]
    assert history[1]["loss"] < history[0]["loss"]
    output = model(pixels)
    torch.testing.assert_close(output["loss"], (output["reconstruction"] + 2.0 * output["kl"].sum(1)).mean())


def test_the_model_is_the_recipes_with_the_configs_settings(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "steps: 1\nbatch: {global: 8}\nmodel: {latent: 3, width: 8, image: [3, 20, 12], likelihood: gaussian}\n"
    )
    model = lockstep.get_model("vae")(lockstep.Config.from_file(tmp_path / "mine.yaml"))
    assert (model.shape, model.latent) == ((3, 20, 12), 3)
    _, settings = load_recipe("gpt", ["model.depth=1", "data.length=16"])
    assert isinstance(gpt := lockstep.get_model("gpt")(settings), GptNetwork)
    assert (len(gpt.blocks), gpt.length) == (1, 16)


def test_unknown_settings_and_recipes_without_a_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("steps: 1\nbatch: {global: 8}\nmodel: {latnet: 3}\n")
    with pytest.raises(
        ConfigError, match=r"get_model\('vae'\).*: model.latnet: unknown key; did you mean model.latent"
    ):
        lockstep.get_model("vae")(lockstep.Config.from_file(tmp_path / "mine.yaml"))
    with pytest.raises(UserError, match=r"get_model\('wing'\): wing is searched, not trained: it has no model"):
        lockstep.get_model("wing")(lockstep.Config.from_file(tmp_path / "mine.yaml"))


def test_a_model_that_the_user_registered_comes_first() -> None:
    lockstep.register_model("vae")(nn.Linear)
    assert lockstep.get_model("vae") is nn.Linear


def test_an_unknown_name_gets_suggestions_of_both_kinds() -> None:
    with pytest.raises(UserError, match="no model is registered as 'vea'; did you mean vae"):
        lockstep.get_model("vea")
    lockstep.register_model("resnet18x")(nn.Identity)
    with pytest.raises(UserError, match="did you mean resnet18x"):
        lockstep.get_model("resnet18y")
    with pytest.raises(UserError, match=r"known: .*digits, .*resnet18x.*, vae, wing"):
        lockstep.get_model("nothing-like-it")
