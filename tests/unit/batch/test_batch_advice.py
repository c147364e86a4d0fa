"""The advice after a batch size search, by the keys of the config that was searched for."""

from typing import Any

from lockstep.batch.batch_advice import BatchAdvice, advise
from lockstep.config.train_schema import Config
from lockstep.train.batch_search import BatchAttempt, BatchSizeSearch
from lockstep.train.train_job import plan_batch
from lockstep.world.world import World

LANES = 8


def advice(sizes: dict[int, float | None], ended: str = "", processes: int = 1, **settings: Any) -> BatchAdvice:
    """Return the advice for these milliseconds per sample at each size; None: the size does not fit."""
    config = Config.model_validate({"epochs": 1, "batch": {"global": 32}, "lanes": LANES, **settings})
    attempts = [BatchAttempt(size, rate is not None, 1, rate) for size, rate in sizes.items()]
    batch = plan_batch(config, World(size=processes))
    lanes = LANES if batch.lanes == "auto" else batch.lanes
    return advise(BatchSizeSearch(attempts, ended), config, batch, lanes, processes)


def test_the_largest_the_fastest_and_the_learning_rate() -> None:
    found = advice({4: 2.0, 8: 1.0, 16: 0.99, 32: None, 24: None}, optim={"lr": 0.001})
    assert found.settings == {"batch.global": 64, "lanes": 8}
    assert found.learning_rates == {"none": 0.001, "sqrt": 0.001 * 2**0.5, "linear": 0.002}
    assert found.lines == [
        "largest that fits: 16 samples a lane (24 do not)",
        "fastest: 8 samples a lane: 2.00 times as fast as the config's 4",
        "advice: batch.global=64 lanes=8 for speed, which is 2 times the batch of 32",
        "a larger batch needs no more memory if its number of lanes grows with it: batch.global=128 lanes=16",
        "the learning rate stays 0.001 unless you scale it: optim.base_batch=32 with optim.lr_scaling=sqrt makes "
        "it 0.00141 (usual for Adam), linear 0.002 (for SGD)",
    ]


def test_a_scaled_learning_rate_is_reported() -> None:
    found = advice({4: 2.0, 8: 1.0, 9: None}, optim={"lr": 0.01, "lr_scaling": "linear", "base_batch": 16})
    assert found.learning_rates == {"linear": 0.04}
    assert found.lines[-1] == "the learning rate becomes 0.04, by optim.lr_scaling=linear"


def test_a_batch_that_is_best_is_kept() -> None:
    found = advice({4: 1.0, 8: 1.0}, ended="most")
    assert found.lines == [
        "largest that fits: 8 samples a lane",
        "fastest: 4 samples a lane, as in the config",
        "a batch of all training samples fits",
        "advice: keep the batch: batch.global=32 lanes=8",
    ]


def test_a_config_that_does_not_fit_gets_advice_that_keeps_its_batch() -> None:
    found = advice({4: None, 2: None, 1: 1.0})
    assert "the config's 4 samples a lane do not fit: to keep a batch of 32, set lanes=32" in found.lines
    odd = advice({5: None, 2: None, 1: 1.0}, batch={"global": 40})
    assert any("to keep a batch of 40, make it divisible by more powers of two" in line for line in odd.lines)


def test_nothing_fits() -> None:
    found = advice({4: None, 2: None, 1: None})
    assert found.settings == {}
    assert found.lines[0].startswith("nothing fits, not even 1 sample a lane: activation_checkpointing.every=1")
    assert "--limit-s" in advice({}, ended="time").lines[0]


def test_the_search_ended_before_anything_fitted() -> None:
    assert advice({16: None, 8: None, 4: None}, ended="tries").lines == [
        "4 samples a lane do not fit, and smaller sizes were not tried: the search reached its limit of tries (--tries)"
    ]
    assert advice({2: None}, ended="time").lines == [
        "2 samples a lane do not fit, and smaller sizes were not tried: time ran out before the search was done: "
        "a larger --limit-s may find more"
    ]


def test_a_config_with_a_batch_per_device_gets_settings_per_device() -> None:
    found = advice({8: 2.0, 16: 1.0, 17: None}, processes=2, batch={"per_device": 32})
    assert found.settings == {"batch.per_device": 64, "lanes": 8}
    found = advice({32: 2.0, 64: 1.0, 65: None}, processes=2, lanes="auto", batch={"per_device": 32}, accumulate=4)
    assert found.settings == {"batch.per_device": 64}
