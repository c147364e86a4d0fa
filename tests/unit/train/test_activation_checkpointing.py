"""Activation checkpointing: which modules are recomputed, and what remains unchanged about them."""

import copy
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.config.train_schema import Config
from lockstep.errors import UserError
from lockstep.train.activation_checkpointing import checkpoint_activations, keep_activations
from lockstep.train.run import Run
from lockstep.train.step_options import StepOptions
from lockstep.train.strategies.parallel_strategy import DataParallel
from lockstep.train.train_job import run_options
from lockstep.train.trainer import Trainer
from lockstep.world.world import World
from tests.commands import LOCKSTEP
from tests.commands import run as run_command
from tests.contracts.workloads import cross_entropy
from tests.sinks import RecordingSink
from tests.unit.train.attention_blocks import Block, gradients_of, make_model


def blocks(model: nn.Module) -> list[Block]:
    return [module for module in model.modules() if isinstance(module, Block)]


def test_a_models_repeated_blocks_are_chosen(model: nn.Module) -> None:
    chosen = checkpoint_activations(model)
    assert chosen.names == [f"left.blocks.{i}" for i in range(2)] + [f"right.blocks.{i}" for i in range(3)]
    assert str(chosen) == "5 of 5 Block (left.blocks.0, left.blocks.1, …, right.blocks.2)"


def test_every_other_one_of_named_classes(model: nn.Module) -> None:
    chosen = checkpoint_activations(model, every=2, classes=["Block"])
    assert str(chosen) == "3 of 5 Block (left.blocks.0, right.blocks.0, right.blocks.2)"
    model(torch.randn(3, 8)).sum().backward()
    assert [block.calls for block in blocks(model)] == [2, 1, 2, 1, 2]
    chosen = checkpoint_activations(model, classes=["Encoder", "Linear"])  # in the place of the first choice
    assert chosen.kinds == ["Encoder", "Linear"]
    assert not any("forward" in block.__dict__ for block in blocks(model))


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (
            {"classes": ["Blok"]},
            r"has no Blok \(did you mean Block\?\): it has Attention, Block, Encoder, LayerNorm, Li",
        ),
        ({"classes": ["ModuleList"]}, "ModuleList only holds modules"),
        ({"classes": "Block"}, "classes='Block': expected a list of names"),
        ({"every": 0}, "every=0: expected a whole number greater than 0"),
    ],
)
def test_wrong_choices_are_refused(choice: dict[str, Any], words: str, model: nn.Module) -> None:
    with pytest.raises(UserError, match=words):
        checkpoint_activations(model, **choice)


def test_a_model_without_repeated_blocks_is_refused() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    with pytest.raises(UserError, match=r"no block is repeated in this model.*classes=\[…\], any of Linear, ReLU, Seq"):
        checkpoint_activations(plain)
    assert checkpoint_activations(plain, classes=["Linear"]).names == ["0", "2"]


def test_activations_are_not_kept(model: nn.Module) -> None:
    inputs = torch.randn(3, 8)
    output = model(inputs)
    assert all(block.kept is not None and block.kept() is not None for block in blocks(model))
    checkpoint_activations(model)
    output = model(inputs)
    assert all(block.kept is not None and block.kept() is None for block in blocks(model))
    output.sum().backward()


def test_evaluation_does_not_recompute(model: nn.Module) -> None:
    checkpoint_activations(model)
    with torch.no_grad():
        model(torch.randn(3, 8))
    model.eval()
    model(torch.randn(3, 8)).sum().backward()
    assert {block.calls for block in blocks(model)} == {2}


def test_names_hooks_and_copies_stay_intact(model: nn.Module) -> None:
    before = list(model.state_dict())
    heard: list[str] = []
    block = blocks(model)[0]
    block.register_forward_hook(lambda *_: heard.append("forward"))
    checkpoint_activations(model)
    assert list(model.state_dict()) == before
    assert type(block) is Block
    other = copy.deepcopy(model)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    other(torch.ones(3, 8)).sum().backward()  # with its own weights
    assert blocks(other)[0].calls == 2
    assert block.calls == 0
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in blocks(other)[0].parameters())
    assert len(heard) == 1
    keep_activations(model)
    assert "forward" not in block.__dict__


def test_a_pickled_model_keeps_its_activations_when_it_is_loaded() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)
    checkpoint_activations(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    inputs = torch.randn(2, 3, 8)
    assert torch.equal(loaded(inputs), model(inputs))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    assert loaded(inputs).any()
    assert checkpoint_activations(loaded).names == ["layers.0", "layers.1"]
    loaded(inputs).sum().backward()


def test_two_backward_passes_of_one_forward_pass(model: nn.Module) -> None:
    inputs = torch.randn(3, 8)
    gradients = []
    for prepare in (keep_activations, checkpoint_activations):
        prepare(model)
        model.zero_grad()
        first, second = model(inputs).square().sum(), model(inputs).sum()
        first.backward(retain_graph=True)
        first.backward()
        second.backward()
        gradients.append(
            [parameter.grad.clone() for parameter in blocks(model)[0].parameters() if parameter.grad is not None]
        )
    assert gradients[0]
    assert all(map(torch.equal, *gradients))


class Sharing(nn.Module):
    """Two modules that share a buffer: the first writes it, the second reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.writer, self.reader = nn.Linear(8, 8), nn.Linear(8, 8)
        for module in (self.writer, self.reader):
            module.register_buffer("mean", torch.zeros(8))
        self.reader.mean = self.writer.mean  # type: ignore[assignment]

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.writer(hidden).square()
        self.writer.mean.copy_(hidden.detach().mean(0))  # type: ignore[operator]
        scores: Tensor = self.reader(hidden * self.reader.mean)
        return scores


def test_modules_that_share_a_buffer_share_it_in_the_recomputation() -> None:
    gradients = []
    for prepare in (keep_activations, checkpoint_activations):
        torch.manual_seed(0)
        model = nn.Sequential(Sharing(), Sharing())
        prepare(model)
        model(torch.ones(3, 8)).sum().backward()
        gradients.append(gradients_of(model))
    assert all(map(torch.equal, *gradients))


COMPILED = """
import torch
from torch import nn
from lockstep.train.activation_checkpointing import checkpoint_activations
from tests.unit.train.attention_blocks import Attention, gradients_of

def trained(recomputed, whole):
    torch.manual_seed(0)
    blocks = [nn.Sequential(Attention(), nn.BatchNorm1d(8), nn.Dropout(0.5)) for _ in range(2)]
    if not whole:
        blocks = [torch.compile(block, backend="aot_eager") for block in blocks]
    model = nn.Sequential(*blocks)
    if recomputed:
        checkpoint_activations(model, classes=["Attention" if whole else "OptimizedModule"])
    called = torch.compile(model, backend="aot_eager") if whole else model
    torch.manual_seed(1)
    called(torch.randn(4, 8)).square().sum().backward()
    return gradients_of(model) + list(model.buffers())

for whole in (True, False):
    assert all(map(torch.equal, trained(False, whole), trained(True, whole))), whole
"""


def test_compiled_modules_have_the_same_gradients() -> None:
    """In a separate process: the compiler leaves threads behind, and warns."""
    finished = run_command([sys.executable, "-c", COMPILED], Path.cwd())
    assert finished.code == 0, finished.err


@pytest.fixture
def model() -> nn.Module:
    return make_model()


@pytest.fixture
def run() -> Iterator[Callable[..., Run]]:
    made = []

    def make(**options: Any) -> Run:
        made.append(Run(None, World(), **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_run_says_which_modules_it_recomputes(model: nn.Module, run: Callable[..., Run]) -> None:
    sink = RecordingSink()
    training = run(activation_checkpointing={"every": 2}, sinks=[sink])
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), cross_entropy, run=training)
    data = TensorDataset(torch.randn(8, 8), torch.arange(8) % 5)
    trainer.train(training.loader(data, 8, lanes=2), steps=1)
    assert sink.events[0]["recomputed"].startswith("3 of 5 Block (left.blocks.0")
    assert trainer.enable_gradient_checkpointing().startswith("5 of 5 Block")
    assert trainer.enable_gradient_checkpointing(classes=["Encoder"]) == "2 of 2 Encoder (left, right)"


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def begin(training: Run) -> None:
    next(training.steps(training.loader(TensorDataset(torch.randn(8, 8)), 8, lanes=2), steps=1, finish=False))


def test_the_option_skips_a_model_with_nothing_to_recompute(model: nn.Module, run: Callable[..., Run]) -> None:
    training = run(activation_checkpointing={})
    training.prepare(small())
    training.prepare(model)
    begin(training)
    assert "forward" in blocks(model)[0].__dict__
    with pytest.raises(UserError, match="no block is repeated in this model"):
        training.checkpoint_activations(small())


def test_the_option_finds_each_class_in_any_model(model: nn.Module, run: Callable[..., Run]) -> None:
    training = run(activation_checkpointing={"classes": ["Block", "Tanh"]})
    other = training.prepare(small())
    training.prepare(model)
    begin(training)
    assert "forward" in blocks(model)[0].__dict__
    assert "forward" in next(module for module in other.modules() if isinstance(module, nn.Tanh)).__dict__


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({}, "no block is repeated in this model"),
        ({"classes": ["Linear", "Block"]}, "the model has no Block: it has Linear, Sequential, Tanh"),
    ],
)
def test_the_option_must_apply_to_at_least_one_model(
    option: dict[str, Any], words: str, run: Callable[..., Run]
) -> None:
    training = run(activation_checkpointing=option)
    training.prepare(small())
    with pytest.raises(UserError, match=words):
        begin(training)


def test_the_setting_changes_no_bit_and_may_change_on_resume() -> None:
    config = Config.model_validate(
        {"epochs": 1, "batch": {"global": 8}, "activation_checkpointing": {"classes": ["Block"]}}
    )
    options = StepOptions(**run_options(config))
    assert options.activation_checkpointing == {"every": 1, "classes": ("Block",)}
    assert "activation_checkpointing" not in options.numerics()
    assert "activation_checkpointing" in Config.free_on_resume


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(UserError, match=r"activation_checkpointing=\{'each': 2\}: expected a dictionary"):
        StepOptions(activation_checkpointing={"each": 2})


def test_data_parallel_copies_on_several_gpus_are_refused(
    model: nn.Module, run: Callable[..., Run], monkeypatch: Any
) -> None:
    with pytest.raises(UserError, match=r"parallel=dp on several GPUs.*-n auto"):
        run().checkpoint_activations(nn.DataParallel(model))
    monkeypatch.setattr(DataParallel, "_num_devices", lambda _: 2)
    with pytest.raises(UserError, match="parallel=dp on several GPUs"):
        run(parallel="dp", determinism="fast", activation_checkpointing={})


def test_a_recipe_reports_what_it_recomputes(tmp_path: Path) -> None:
    command = [*LOCKSTEP, "train", "gpt", "--quick", "activation_checkpointing.every=2", "data.sample=0"]
    finished = run_command(command, tmp_path)
    assert finished.code == 0, finished.err
    assert "activations recomputed: 1 of 2 TransformerBlock (blocks.0)" in finished.out
