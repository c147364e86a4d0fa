"""Turn the results of a batch size search into recommended settings, and sentences that explain them."""

from typing import Any, NamedTuple

from lockstep.config.plurals import count_noun
from lockstep.config.train_schema import Config
from lockstep.train.batch_search import BatchSizeSearch
from lockstep.train.optim.optimizer_factory import Scaling, scaled_lr
from lockstep.train.train_job import BatchPlan

_ENDS = {
    "time": "time ran out before the search was done: a larger --limit-s may find more",
    "tries": "the search reached its limit of tries (--tries)",
    "most": "a batch of all training samples fits",
}


class BatchAdvice(NamedTuple):
    """The recommendation."""

    settings: dict[str, int]  # config keys and values
    learning_rates: dict[str, float]  # for the recommended batch, by optim.lr_scaling
    lines: list[str]  # for a person to read


def advise(search: BatchSizeSearch, config: Config, batch: BatchPlan, lanes: int, processes: int) -> BatchAdvice:
    """Recommend a batch size.

    Args:
        search: the result of the search.
        config: the config that the search was for.
        batch: the config's own batch.
        lanes: the number of lanes that it is divided into.
        processes: the number of processes that will share the machine.
    """
    largest, fastest = search.largest, search.fastest
    if largest is None or fastest is None:
        return BatchAdvice({}, {}, [_nothing_fits(search)])
    own = batch.size // lanes
    lines = [f"largest that fits: {_samples(largest)} a lane{_beyond(search)}"]
    lines.append(f"fastest: {_samples(fastest.size)} a lane{_gain(search, own)}")
    if search.ended:
        lines.append(_ENDS[search.ended])
    if own > largest:
        lines.append(_how_to_keep(batch, own, largest))
    advised = fastest.size * lanes
    settings = _settings(config, fastest.size, lanes, processes)
    words = " ".join(f"{name}={value}" for name, value in settings.items())
    if advised == batch.size:
        return BatchAdvice(settings, {}, [*lines, f"advice: keep the batch: {words}"])
    lines.append(f"advice: {words} for speed, which is {advised / batch.size:.3g} times the batch of {batch.size}")
    if config.batch.global_batch is not None:
        lines.append(
            "a larger batch needs no more memory if its number of lanes grows with it: "
            f"batch.global={2 * advised} lanes={2 * lanes}"
        )
    rates = _rates(config, batch.size, advised)
    return BatchAdvice(settings, rates, [*lines, _about_rates(config, batch.size, rates)])


def _nothing_fits(search: BatchSizeSearch) -> str:
    smallest = search.too_large
    if smallest is None:
        return "no trial finished in time: a larger --limit-s may help"
    if search.ended:
        return f"{_samples(smallest)} a lane do not fit, and smaller sizes were not tried: {_ENDS[search.ended]}"
    return (
        f"nothing fits, not even {_samples(smallest)} a lane: activation_checkpointing.every=1 and precision=bf16 use "
        "less memory, parallel=zero shards the optimizer state, and a smaller model needs less of everything"
    )


def _beyond(search: BatchSizeSearch) -> str:
    return "" if search.too_large is None else f" ({search.too_large} do not)"


def _gain(search: BatchSizeSearch, own: int) -> str:
    fastest = search.fastest
    before = next((attempt.sample_s for attempt in search.attempts if attempt.size == own), None)
    if fastest is None or fastest.sample_s is None or before is None or fastest.size == own:
        return ", as in the config" if fastest is not None and fastest.size == own else ""
    return f": {before / fastest.sample_s:.2f} times as fast as the config's {own}"


def _how_to_keep(batch: BatchPlan, own: int, largest: int) -> str:
    lanes = 1
    while batch.size % lanes == 0 and batch.size // lanes > largest:
        lanes *= 2
    remedy = f"set lanes={lanes}" if batch.size % lanes == 0 else "make it divisible by more powers of two"
    return f"the config's {_samples(own)} a lane do not fit: to keep a batch of {batch.size}, {remedy}"


def _settings(config: Config, lane_batch: int, lanes: int, processes: int) -> dict[str, int]:
    """Return the recommended batch, by the keys that the config uses."""
    if config.batch.per_device is None:
        return {"batch.global": lane_batch * lanes, "lanes": lanes}
    if config.accumulate is not None:
        return {"batch.per_device": lane_batch}
    return {"batch.per_device": lane_batch * lanes // processes, "lanes": lanes}


def _rates(config: Config, before: int, after: int) -> dict[str, float]:
    optim = config.optim
    rules: list[Scaling] = ["none", "sqrt", "linear"]
    if optim.lr_scaling != "none":
        return {optim.lr_scaling: scaled_lr(optim.lr, after, optim.base_batch, optim.lr_scaling)}
    return {rule: scaled_lr(optim.lr, after, before, rule) for rule in rules}


def _about_rates(config: Config, before: int, rates: dict[str, Any]) -> str:
    rule = config.optim.lr_scaling
    if rule != "none":
        return f"the learning rate becomes {rates[rule]:.3g}, by optim.lr_scaling={rule}"
    return (
        f"the learning rate stays {config.optim.lr:.3g} unless you scale it: optim.base_batch={before} with "
        f"optim.lr_scaling=sqrt makes it {rates['sqrt']:.3g} (usual for Adam), linear {rates['linear']:.3g} (for SGD)"
    )


def _samples(count: int) -> str:
    return count_noun(count, "sample")
