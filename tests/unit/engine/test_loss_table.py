"""The table of loss sums and counts: scales and losses over all lanes; control flags."""

import pytest
import torch
from torch import Tensor

from lockstep.engine.loss_table import MAX_TERMS, SNAPSHOT, STOP, ControlFlags, LossTable, as_count, as_terms
from lockstep.errors import UserError

CPU = torch.device("cpu")


def term(loss_sum: float, count: int | float | Tensor) -> tuple[Tensor, int | float | Tensor]:
    return torch.tensor(loss_sum, requires_grad=True), count


def test_scale_and_loss_are_over_the_lanes_of_all_ranks() -> None:
    first, second = LossTable(2, CPU), LossTable(2, CPU)
    first.add_lane(0, 3)
    first.record(0, {"loss": term(6.0, 3)})
    second.add_lane(1, 1)
    second.record(1, {"loss": term(2.0, torch.tensor(1))})
    rows = first.local() + second.local()
    for table in (first, second):
        table.complete(rows)
        assert table.sizes == [3, 1]
        assert table.scale(0).item() == 0.25
        assert table.loss().item() == 2.0
        table.check_names()


def test_backward_passes_of_one_lane_add_up() -> None:
    table = LossTable(1, CPU)
    table.add_lane(0, 4)
    table.record(0, {"loss": term(1.0, 1)})
    table.record(0, {"loss": term(5.0, 2)})
    assert table.loss().item() == 2.0
    with pytest.raises(
        UserError, match=r"the terms \['other'\], but an earlier one of this step had \['loss'\]: return"
    ):
        table.record(0, {"other": term(1.0, 1)})


def test_a_count_of_zero_divides_by_one() -> None:
    table = LossTable(1, CPU)
    table.add_lane(0, 0)
    table.record(0, {"loss": term(0.0, 0)})
    assert table.scale(0).item() == 1.0
    assert table.loss().item() == 0.0


def test_lanes_with_a_nonfinite_loss_are_named() -> None:
    table = LossTable(4, CPU)
    for lane, value in enumerate([1.0, torch.inf, 2.0, torch.nan]):
        table.add_lane(lane, 1)
        table.record(lane, {"loss": term(value, 1)})
    assert table.nonfinite_lanes() == [1, 3]


def test_different_terms_on_two_ranks_are_an_error() -> None:
    first, second = LossTable(2, CPU), LossTable(2, CPU)
    for lane, (table, name) in enumerate([(first, "a"), (second, "b")]):
        table.add_lane(lane, 1)
        table.record(lane, {name: term(1.0, 1)})
    first.complete(first.local() + second.local())
    with pytest.raises(UserError, match=r"loss terms differ between ranks; here they are \['a'\]"):
        first.check_names()


def test_a_loss_is_a_sum_and_a_count_or_up_to_eight_terms() -> None:
    assert list(as_terms(term(1.0, 2))) == ["loss"]
    with pytest.raises(UserError, match=r"not a tensor of shape \(\)"):
        as_terms(torch.tensor(1.0))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"1 to {MAX_TERMS} terms, not 9"):
        as_terms({str(number): term(1.0, 1) for number in range(9)})
    with pytest.raises(UserError, match="a number or a tensor of one element"):
        as_count("many")


def test_what_any_rank_asks_for_is_taken_once() -> None:
    flags = ControlFlags()
    flags.request(STOP)
    assert (flags.take_own(), flags.take_own()) == (STOP, 0)
    flags.receive(torch.tensor([STOP, 0.0, SNAPSHOT, 0.0]))
    assert (flags.take_received(), flags.take_received()) == (STOP | SNAPSHOT, 0)
