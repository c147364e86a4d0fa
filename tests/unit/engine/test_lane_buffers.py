"""How the lanes' buffers are combined, checked against numbers computed by hand."""

import torch
from torch import nn

from lockstep.engine.lane_buffers import LaneBuffers


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("mean", "first", "max"):
            self.register_buffer(name, torch.tensor([10.0]))
        self.register_buffer("count", torch.tensor(5))


def combined(lanes: list[tuple[int, float]]) -> Holder:
    """Run lanes of (samples, value), each of which sets the buffers; return the combined buffers."""
    holder = Holder()
    buffers = LaneBuffers([holder], {"mean": "mean", "first": "first", "max": "max"})
    buffers.begin()
    for lane, (size, value) in enumerate(lanes):
        buffers.open_lane()
        if size:
            for name in ("mean", "first", "max"):
                assert getattr(holder, name).item() == 10.0, "every lane starts from the step's first values"
                getattr(holder, name).fill_(value)
            holder.count += 1
        buffers.close_lane(lane, size)
    buffers.check()
    buffers.combine()
    return holder


def test_mean_is_weighted_by_samples() -> None:
    assert combined([(1, 4.0), (3, 8.0)]).mean.item() == 7.0


def test_first_is_the_first_lane_with_samples() -> None:
    assert combined([(0, 99.0), (2, 3.0), (2, 4.0), (2, 5.0)]).first.item() == 3.0


def test_max_is_over_the_lanes_and_not_over_the_old_value() -> None:
    assert combined([(2, 1.0), (2, 6.0), (0, 99.0), (2, 5.0)]).max.item() == 6.0


def test_counters_advance_once() -> None:
    assert combined([(2, 0.0)] * 4).count == 6


def test_empty_lanes_add_nothing() -> None:
    assert combined([(0, 99.0), (1, 4.0), (0, 99.0), (3, 8.0)]).mean.item() == 7.0


def test_batch_norm_statistics_are_averaged_by_samples() -> None:
    norm = nn.BatchNorm1d(2, momentum=0.5)
    buffers = LaneBuffers([norm], {})
    parts = [torch.tensor([[0.0, 2.0], [2.0, 4.0]]), torch.tensor([[6.0, 0.0], [6.0, 0.0], [6.0, 0.0], [6.0, 0.0]])]
    buffers.begin()
    for lane, part in enumerate(parts):
        buffers.open_lane()
        norm(part)
        buffers.close_lane(lane, len(part))
    buffers.combine()
    assert norm.running_mean is not None and norm.running_var is not None
    # Lane means (1, 3) and (6, 0), variances (2, 2) and (0, 0); from (0, 0) and (1, 1), half way, weighted 2 to 4.
    torch.testing.assert_close(norm.running_mean, torch.tensor([0.5 * (2 * 1 + 4 * 6) / 6, 0.5 * (2 * 3 + 0) / 6]))
    torch.testing.assert_close(norm.running_var, torch.tensor([0.5 + 0.5 * 2 * 2 / 6, 0.5 + 0.5 * 2 * 2 / 6]))
    assert norm.num_batches_tracked == 1
