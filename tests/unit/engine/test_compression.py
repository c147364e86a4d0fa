"""The settings of compression, and which are refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from lockstep.config.duration import Duration
from lockstep.config.train_schema import BatchConfig, Config
from lockstep.engine.compression import Compression
from lockstep.errors import UserError
from lockstep.train.step_options import StepOptions
from lockstep.train.strategies.strategy_factory import choose_strategy
from lockstep.train.train_job import run_options
from lockstep.world.world import World


def strategy_for(size: int = 2, **options: Any) -> str:
    return choose_strategy(World(size=size), StepOptions(**{"determinism": "fast"} | options)).strategy.name


@pytest.mark.parametrize("kind", ["fp16", "bf16", "powersgd"])
def test_compression_needs_fast_mode_and_ddp(kind: str) -> None:
    assert strategy_for(compression=kind) == "ddp"
    assert strategy_for(compression=kind, parallel="ddp") == "ddp"
    assert strategy_for(1, compression=kind) == "single"
    with pytest.raises(UserError, match=rf"compression={kind} rounds what every process sends.*set determinism=fast"):
        strategy_for(compression=kind, determinism="lockstep")
    with pytest.raises(UserError, match=rf"compression={kind} is for .*parallel=zero.*use parallel=ddp"):
        strategy_for(compression=kind, parallel="zero")


def test_error_feedback_does_not_work_with_a_loss_scaler() -> None:
    with pytest.raises(UserError, match=r"precision=fp16 may scale differently: use precision=bf16"):
        strategy_for(compression="powersgd", precision="fp16")
    assert strategy_for(compression={"kind": "powersgd", "error_feedback": False}, precision="fp16") == "ddp"
    assert strategy_for(compression="fp16", precision="fp16") == "ddp"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("fp8", "compression='fp8': expected one of none, fp16, bf16, powersgd"),
        (8, "compression=8: expected a name, or a mapping"),
        ({"kind": "powersgd", "ranks": 2}, "compression has no setting ranks; did you mean rank?"),
        ({"kind": "powersgd", "rank": 0}, "compression: rank=0: expected a whole number greater than 0"),
        ({"kind": "powersgd", "rank": "2"}, "compression: rank='2': expected a whole number greater than 0"),
        ({"kind": "powersgd", "rank": 1.5}, "compression: rank=1.5: expected a whole number greater than 0"),
        ({"kind": "powersgd", "min_compression_rate": 0}, "min_compression_rate=0: expected a number greater than 0"),
        ({"kind": "powersgd", "min_compression_rate": "2"}, "min_compression_rate='2': expected a number"),
        ({"kind": "powersgd", "warm_start": "yes"}, "compression: warm_start='yes': expected True or False"),
        ({"kind": "powersgd", "error_feedback": 1}, "compression: error_feedback=1: expected True or False"),
        ({"kind": ["fp16"]}, "compression=['fp16']: expected one of"),
        (
            {"kind": "bf16", "rank": 4},
            "compression: rank is for powersgd only, but kind=bf16: set kind=powersgd, or omit rank",
        ),
        ({"rank": 2}, "compression: rank is for powersgd only, but kind=none"),
        ({"kind": "fp16", "start_after": 5}, "compression: start_after is for powersgd only, but kind=fp16"),
        ({"kind": "fp16", "warm_start": False}, "compression: warm_start is for powersgd only, but kind=fp16"),
        ({"kind": "powersgd", "start_after": "soon"}, "compression: start_after: expected a duration"),
    ],
)
def test_wrong_settings_are_refused(given: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        StepOptions(compression=given)
    assert message in str(caught.value)


def test_default_settings_of_powersgd_are_accepted_for_any_kind() -> None:
    """A config passes all settings on, including its defaults."""
    given = {"kind": "bf16", "rank": 1, "start_after": Duration.parse("10 steps"), "warm_start": True}
    assert StepOptions(compression=given).compression.plain() == "bf16"


def problems_with(compression: Any) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        Config.model_validate({"epochs": 1, "batch": {"global": 8}, "compression": compression})
    return [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in caught.value.errors()]


def test_a_config_refuses_settings_that_its_kind_does_not_have() -> None:
    assert problems_with({"rank": 2}) == ["compression.rank: only valid with kind: powersgd, got kind: none"]
    assert problems_with({"kind": "bf16", "start_after": 3, "error_feedback": False}) == [
        "compression.start_after: only valid with kind: powersgd, got kind: bf16",
        "compression.error_feedback: only valid with kind: powersgd, got kind: bf16",
    ]
    (problem,) = problems_with({"kind": "fp8", "rank": 2})
    assert problem.startswith("compression.kind")


def test_compression_is_part_of_the_numerics_if_there_is_any() -> None:
    assert "compression" not in StepOptions().numerics()
    assert StepOptions(compression="bf16").numerics()["compression"] == "bf16"
    assert StepOptions(compression={"kind": "powersgd", "rank": 3}).numerics()["compression"] == {
        "kind": "powersgd",
        "rank": 3,
        "start_after": "10 steps",
        "min_compression_rate": 2.0,
        "warm_start": True,
        "error_feedback": True,
    }


@pytest.mark.parametrize("given", ["fp16", {"kind": "powersgd", "rank": 4, "start_after": "1 epoch"}])
def test_a_config_gives_the_same_settings(given: Any) -> None:
    config = Config.model_validate({"epochs": 1, "batch": {"global": 8}, "compression": given})
    options = StepOptions(**run_options(config))
    assert options.compression.plain() == Compression.read(given).plain()
    assert StepOptions(**run_options(Config(epochs=1, batch=BatchConfig(global_batch=8)))).compression.kind == "none"
