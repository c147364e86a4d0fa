"""Which strategy is chosen, and why; what is refused before there is a model."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.errors import UserError
from lockstep.train.run import Run
from lockstep.train.step_options import StepOptions
from lockstep.train.strategies import strategy_factory
from lockstep.train.strategies.strategy_factory import choose_strategy
from lockstep.train.trainer import Trainer
from lockstep.world.world import World

MODEL = nn.Linear(1000, 1000, bias=False)  # 4 MB: 16 MB to train, 10 MB if two ranks share out the optimizer


def chosen(size: int, **options: Any) -> tuple[str, str]:
    strategy, reason = choose_strategy(World(size=size), StepOptions(**options), [MODEL])
    return strategy.name, reason


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the memory of every device."""

    def set_to(num_bytes: int) -> None:
        monkeypatch.setattr(strategy_factory, "available_memory_bytes", lambda: num_bytes)

    return set_to


def test_one_process_needs_no_strategy(memory: Any) -> None:
    memory(1)
    assert chosen(1) == ("single", "one process")


def test_auto_chooses_by_what_fits_on_a_device_and_says_so(memory: Any) -> None:
    memory(int(32.1e6))
    name, reason = chosen(2)
    assert name == "ddp"
    assert reason == "weights, gradients and optimizer make 16.0 MB on each device, and there is room for 16.1 MB"
    memory(int(31.9e6))
    name, reason = chosen(2)
    assert name == "zero"
    assert "12.0 MB with the optimizer shared out, and there is room for 15.9 MB" in reason


def test_ranks_of_one_machine_share_its_memory(memory: Any) -> None:
    memory(int(63e6))
    assert choose_strategy(World(size=2, local_size=2), StepOptions(), [MODEL]).strategy.name == "zero"


def test_a_model_too_large_for_zero_is_pointed_to_fsdp(memory: Any) -> None:
    memory(int(20e6))
    name, reason = chosen(2)
    assert name == "zero"
    assert "fsdp needs less, with determinism=fast" in reason


@pytest.mark.parametrize("name", ["single", "ddp", "zero", "dp"])
def test_a_configured_strategy_is_used(name: str) -> None:
    assert chosen(1, parallel=name) == (name, "as configured")


@pytest.mark.parametrize("name", ["single", "dp"])
def test_one_process_strategies_refuse_several(name: str) -> None:
    with pytest.raises(UserError, match=rf"parallel={name}.* is for one process, but 3 were started: omit -n"):
        chosen(3, parallel=name)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="parallel='dpp': expected one of auto, single, dp, ddp, zero"):
        Run(None, World(), parallel="dpp")


def test_several_gpus_in_one_process_are_fast_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running DataParallel needs several GPUs; this checks only that it would be used."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    world = World(device=torch.device("cuda", 0))
    with pytest.raises(UserError, match=r"cuts every lane into pieces for 2 GPUs.*determinism=fast"):
        choose_strategy(world, StepOptions(parallel="dp"))
    strategy = choose_strategy(world, StepOptions(parallel="dp", determinism="fast")).strategy
    called = strategy.to_call(MODEL)
    assert isinstance(called, nn.DataParallel)
    assert called.module is MODEL


def test_a_data_parallel_model_is_taken_out_of_its_wrapper() -> None:
    run = Run(None, World())
    model = nn.Linear(4, 3)
    assert run.prepare(nn.DataParallel(model)) is model
    assert run.prepare(model) is model
    assert list(run.state()) == ["model/weight", "model/bias"]


def test_a_trainer_takes_a_data_parallel_model_with_its_optimizer() -> None:
    wrapped = nn.DataParallel(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    trainer = Trainer(wrapped, optimizer, lambda model, batch: (model(batch[0]).square().sum(), len(batch[0])))
    before = wrapped.module.weight.detach().clone()
    trainer.train(trainer.run.loader(TensorDataset(torch.ones(8, 4)), 4), steps=2)
    assert not torch.equal(wrapped.module.weight, before)


def test_all_models_count(memory: Any) -> None:
    memory(int(33e6))
    assert choose_strategy(World(size=2), StepOptions(), [MODEL]).strategy.name == "ddp"
    assert choose_strategy(World(size=2), StepOptions(), [MODEL, nn.Linear(1000, 300)]).strategy.name == "zero"


class OwnSGD(torch.optim.SGD):
    pass


def test_auto_falls_back_to_ddp_if_the_optimizer_does_not_fit(memory: Any) -> None:
    memory(1)
    loader = Run(None).loader(TensorDataset(torch.zeros(8, 3)), 8)
    first = choose_strategy(World(size=2), StepOptions(), [MODEL])
    assert strategy_factory.recheck_choice(first, [torch.optim.SGD(MODEL.parameters())], loader) is first
    then = strategy_factory.recheck_choice(first, [OwnSGD(MODEL.parameters())], loader)
    assert then.strategy.name == "ddp"
    assert "but parallel=zero runs an optimizer on parts of parameters, and OwnSGD" in then.reason
    choice = choose_strategy(World(size=2), StepOptions(parallel="zero"), [MODEL])
    with pytest.raises(UserError, match="OwnSGD"):
        strategy_factory.recheck_choice(choice, [OwnSGD(MODEL.parameters())], loader)
