"""Schedules: equal to torch's own, pure, continuous, and the same however a run's length is declared."""

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR, StepLR

from lockstep.config.duration import Duration, RunLength
from lockstep.config.train_schema import ScheduleConfig
from lockstep.errors import UserError
from lockstep.train.optim.lr_schedule import Schedule, build_schedule, set_rates

TOTAL = 40
RUN = RunLength(steps_per_epoch=10, global_batch=64, total_steps=TOTAL)
MakeScheduler = Callable[[Optimizer], LRScheduler]


def optimizer_of_two_groups() -> Optimizer:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    return torch.optim.SGD([{"params": weights[:1], "lr": 0.5}, {"params": weights[1:], "lr": 0.03}])


def rates(optimizer: Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def torchs_rates(make: MakeScheduler) -> Iterator[list[float]]:
    """Yield the rates that each update sees, with the scheduler used as torch's documentation says."""
    optimizer = optimizer_of_two_groups()
    scheduler = make(optimizer)
    while True:
        yield rates(optimizer)
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # SequentialLR calls its parts in a way torch warns of
            scheduler.step()


def our_rates(schedule: Schedule, run: RunLength = RUN) -> Iterator[list[float]]:
    optimizer = optimizer_of_two_groups()
    factor = schedule.bind(run)
    completed = 0
    while True:
        set_rates(optimizer, factor(completed))
        yield rates(optimizer)
        optimizer.step()
        completed += 1


def after_warmup(warmup: int, then: MakeScheduler) -> MakeScheduler:
    def make(optimizer: Optimizer) -> LRScheduler:
        ramp = LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup - 1)
        return SequentialLR(optimizer, [ramp, then(optimizer)], milestones=[warmup])

    return make


def falling(steps: int, final: float) -> MakeScheduler:
    return lambda optimizer: LinearLR(optimizer, 1.0, final, steps)


def in_steps(every: int, factor: float) -> MakeScheduler:
    return lambda optimizer: StepLR(optimizer, every, factor)


def along_cosine(steps: int) -> MakeScheduler:
    return lambda optimizer: CosineAnnealingLR(optimizer, steps)


@pytest.mark.parametrize(
    ("ours", "torchs", "updates"),
    [
        (Schedule.linear(final=0.2), falling(TOTAL, 0.2), TOTAL + 5),
        (Schedule.linear(), falling(TOTAL, 0.0), TOTAL + 5),
        (Schedule.linear(length="3 epochs", final=0.5), falling(30, 0.5), TOTAL + 5),
        (Schedule.cosine(), along_cosine(TOTAL), TOTAL + 1),  # later torch's rises again
        (Schedule.cosine(length="1600 samples"), along_cosine(25), 26),
        (Schedule.step(every="1 epoch"), in_steps(10, 0.1), TOTAL + 5),
        (Schedule.step(every=7, factor=0.5), in_steps(7, 0.5), TOTAL + 5),
        (Schedule.linear(warmup=8, final=0.2), after_warmup(8, falling(TOTAL - 8, 0.2)), TOTAL + 5),
        (Schedule.cosine(warmup="0.5 epochs"), after_warmup(5, along_cosine(TOTAL - 5)), TOTAL + 1),
        (Schedule.step(warmup=6, every=9, factor=0.3), after_warmup(6, in_steps(9, 0.3)), TOTAL + 5),
        (Schedule.constant(warmup=6), lambda optimizer: LinearLR(optimizer, 1 / 6, total_iters=5), TOTAL),
    ],
    ids=lambda value: str(value) if isinstance(value, Schedule) else "",
)
def test_the_rates_are_torchs(ours: Schedule, torchs: MakeScheduler, updates: int) -> None:
    for update, (own, theirs) in enumerate(islice(zip(our_rates(ours), torchs_rates(torchs), strict=True), updates)):
        assert own == pytest.approx(theirs, rel=1e-12, abs=1e-15), f"at update {update + 1}"


def test_cosine_with_a_floor_is_torchs_of_one_group() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    scheduler = CosineAnnealingLR(optimizer, TOTAL, eta_min=0.05)
    factor = Schedule.cosine(final=0.1).bind(RUN)
    for completed in range(TOTAL + 1):
        assert 0.5 * factor(completed) == pytest.approx(rates(optimizer)[0], rel=1e-12)
        optimizer.step()
        scheduler.step()


def test_update_n_of_a_warmup_of_w_gets_n_over_w() -> None:
    factor = Schedule.constant(warmup=4).bind(RUN)
    assert [factor(completed) for completed in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_without_warmup_the_first_update_has_the_whole_rate() -> None:
    for schedule in (Schedule.constant(), Schedule.linear(), Schedule.cosine(final=0.3), Schedule.step(every=1)):
        assert schedule.bind(RUN)(0) == 1.0


SPANS = st.integers(0, 60)
FINALS = st.floats(0, 1)
SCHEDULES = st.one_of(
    st.builds(Schedule.constant, warmup=SPANS),
    st.builds(Schedule.linear, warmup=SPANS, final=FINALS),
    st.builds(Schedule.cosine, warmup=SPANS, final=FINALS),
    st.builds(Schedule.step, warmup=SPANS, every=st.integers(1, 60), factor=st.floats(0, 1, exclude_min=True)),
)


@settings(max_examples=200, deadline=None)
@given(SCHEDULES, st.integers(1, 200))
def test_a_factor_is_never_below_0_or_above_1(schedule: Schedule, total: int) -> None:
    factor = schedule.bind(RunLength(total_steps=total))
    assert all(0 <= factor(completed) <= 1 for completed in range(total + 80))


@settings(max_examples=200, deadline=None)
@given(SCHEDULES, st.integers(61, 200))
def test_it_rises_in_the_warmup_meets_1_and_then_only_falls(schedule: Schedule, total: int) -> None:
    factor = schedule.bind(RunLength(total_steps=total))
    warmup = int(schedule.warmup.number)
    values = [factor(completed) for completed in range(total + 80)]
    assert values[:warmup] == sorted(set(values[:warmup]))
    assert values[warmup] == 1.0  # the first update after it,
    assert warmup == 0 or values[warmup - 1] == 1.0  # and its last
    assert values[warmup:] == sorted(values[warmup:], reverse=True)


@settings(max_examples=100, deadline=None)
@given(SCHEDULES, st.integers(1, 200), st.randoms(use_true_random=False))
def test_it_is_a_pure_function(schedule: Schedule, total: int, random: Random) -> None:
    run = RunLength(total_steps=total)
    factor = schedule.bind(run)
    in_order = {completed: factor(completed) for completed in range(total)}
    shuffled = list(in_order) * 2
    random.shuffle(shuffled)
    assert all(factor(completed) == in_order[completed] for completed in shuffled)
    resumed = schedule.bind(run)
    assert all(resumed(completed) == in_order[completed] for completed in shuffled)


@settings(max_examples=100, deadline=None)
@given(FINALS, st.integers(1, 100), st.integers(0, 1000))
def test_past_the_end_it_stays_at_exactly_final(final: float, total: int, later: int) -> None:
    for make in (Schedule.linear, Schedule.cosine):
        assert make(final=final).bind(RunLength(total_steps=total))(total + later) == final


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "step"])
def test_a_run_declared_in_steps_epochs_and_samples_has_the_same_rates(kind: str) -> None:
    def declared(warmup: str, length: str, every: str) -> list[list[float]]:
        schedule = Schedule(
            kind=kind,
            warmup=Duration.parse(warmup),
            length=Duration.parse(length),
            every=Duration.parse(every),
            final=0.1,
        )
        return list(islice(our_rates(schedule), TOTAL + 5))

    in_steps = declared("5 steps", "30 steps", "12 steps")
    assert declared("0.5 epochs", "3 epochs", "1.2 epochs") == in_steps
    assert declared("320 samples", "1920 samples", "768 samples") == in_steps
    assert len({tuple(each) for each in in_steps}) > 2  # they do move


def test_the_ends_of_run_and_length_are_the_same_end() -> None:
    assert list(islice(our_rates(Schedule.cosine(length="4 epochs")), 50)) == list(
        islice(our_rates(Schedule.cosine()), 50)
    )


def test_a_short_run_may_end_in_its_warmup() -> None:
    factor = Schedule.cosine(warmup="500 steps").bind(RunLength(total_steps=8))
    assert [factor(completed) for completed in range(8)] == [n / 500 for n in range(1, 9)]


def test_a_skipped_update_moves_nothing() -> None:
    """Rates follow the updates completed, not the batches seen."""
    optimizer = optimizer_of_two_groups()
    factor = Schedule.linear(warmup=3).bind(RUN)
    seen = []
    completed = 0
    for is_skipped in (False, True, True, False, False):
        set_rates(optimizer, factor(completed))
        seen.append(rates(optimizer)[0])
        completed += not is_skipped
    assert seen == [pytest.approx(0.5 * n / 3) for n in (1, 2, 2, 2, 3)]


def test_a_constant_schedule_changes_no_bit_of_a_rate() -> None:
    optimizer = optimizer_of_two_groups()
    for completed in range(3):
        set_rates(optimizer, Schedule.constant().bind(RunLength())(completed))
        assert rates(optimizer) == [0.5, 0.03]


def test_base_rates_are_kept_as_torch_keeps_them() -> None:
    optimizer = optimizer_of_two_groups()
    for _ in range(3):
        set_rates(optimizer, 0.1)
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.5, 0.03]
    assert rates(optimizer) == [0.05, 0.003]


def test_base_rates_travel_with_the_optimizers_state() -> None:
    optimizer, other = optimizer_of_two_groups(), optimizer_of_two_groups()
    set_rates(optimizer, 0.1)
    other.load_state_dict(optimizer.state_dict())
    set_rates(other, 0.5)
    assert rates(other) == [0.25, 0.015]


def test_a_rate_in_a_tensor_is_filled_in_place() -> None:
    """Also one that several groups share, whose base must be read before any of them is filled."""
    rate = torch.tensor(0.5)
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.Adam([{"params": [weight]} for weight in weights], lr=rate, foreach=False)
    assert all(group["lr"] is rate for group in optimizer.param_groups)
    for factor in (0.5, 0.25):
        set_rates(optimizer, factor)
        assert all(group["lr"] is rate for group in optimizer.param_groups)
        assert rate.item() == 0.5 * factor
        assert [group["initial_lr"] for group in optimizer.param_groups] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Schedule(kind="cosin"), "schedule: expected one of constant, linear, cosine, step, got 'cosin'"),
        (lambda: Schedule.cosine(warmup="2 weeks"), "schedule: warmup: expected a duration, .*got '2 weeks'$"),
        (lambda: Schedule.linear(length="0 epochs"), "schedule: length=0 epochs: expected a duration greater than 0"),
        (lambda: Schedule.step(every=0), "schedule: every=0 steps: expected a duration greater than 0"),
        (lambda: Schedule.cosine(final=-0.1), "schedule: final=-0.1: expected a number of at least 0"),
        (lambda: Schedule.linear(final=float("nan")), "schedule: final=nan: expected a number of at least 0"),
        (lambda: Schedule.step(every=1, factor=0.0), "schedule: factor=0.0: expected a number greater than 0"),
        (lambda: Schedule.step(every=1, factor=2.0), "schedule: factor=2.0: .* of at most 1"),
        (lambda: Schedule(kind="step").bind(RUN), "schedule: step needs every=, as in every='30 epochs'"),
        (lambda: Schedule.cosine().bind(RunLength()), "schedule: cosine ends with the run.* give length="),
        (lambda: Schedule.linear().bind(RunLength()), "schedule: linear ends with the run.* give length="),
        (lambda: Schedule.cosine(warmup="1 epoch").bind(RunLength()), "schedule: warmup: 1 epoch cannot be converted"),
        (lambda: Schedule.step(every="1 epoch").bind(RunLength()), "schedule: every: 1 epoch cannot be converted"),
        (
            lambda: Schedule.cosine(length="9 epochs").bind(RunLength()),
            "schedule: length: 9 epochs cannot be converted",
        ),
        (
            lambda: Schedule.cosine(warmup=20, length="1 epoch").bind(RUN),
            "schedule: length=1 epoch ends in the warm-up of 20 steps",
        ),
    ],
)
def test_mistakes_are_one_line(make: Callable[[], object], problem: str) -> None:
    with pytest.raises(UserError, match=f"^{problem}") as caught:
        make()
    assert "\n" not in str(caught.value)


def test_it_is_shown_as_it_would_be_called() -> None:
    assert str(Schedule.constant()) == "constant()"
    assert str(Schedule.cosine(warmup="2 epochs", final=0.1)) == "cosine(warmup=2 epochs, final=0.1)"
    assert str(Schedule.step(every="30 epochs", factor=0.5)) == "step(every=30 epochs, factor=0.5)"


def test_every_setting_of_the_config_arrives() -> None:
    values = {"kind": "step", "warmup": "1 epoch", "length": 9, "final": 0.3, "every": "5 samples", "factor": 0.7}
    assert build_schedule(ScheduleConfig.model_validate(values)) == Schedule(
        kind="step",
        warmup=Duration.parse("1 epoch"),
        length=Duration.parse(9),
        final=0.3,
        every=Duration.parse("5 samples"),
        factor=0.7,
    )
    assert build_schedule(ScheduleConfig()) == Schedule.constant()


def test_a_custom_loop_needs_no_pydantic() -> None:
    code = """
import sys
sys.modules["pydantic"] = sys.modules["yaml"] = None   # as if they were not installed
import lockstep, torch
from lockstep.train.optim.lr_schedule import set_rates
groups = lockstep.parameter_groups(torch.nn.Linear(2, 2), [], lr=lockstep.scaled_lr(0.1, 64, 32))
optimizer = torch.optim.SGD(groups)
set_rates(optimizer, lockstep.Schedule.constant(warmup="4 steps").bind(lockstep.train.optim.lr_schedule.RunLength())(0))
print(optimizer.param_groups[0]["lr"])
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (finished.stdout, finished.stderr) == ("0.05\n", "")
