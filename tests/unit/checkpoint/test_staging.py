"""Copies that hold while the originals change, in memory that is used again."""

import pytest
import torch

from lockstep.checkpoint.staging import ChangedWhileCopied, Staging


def test_copies_are_contiguous_and_apart() -> None:
    whole = torch.arange(6.0).view(2, 3)
    parameter = torch.nn.Parameter(whole.clone())
    tensors = {"a": whole, "tied": whole, "t": whole.t(), "p": parameter, "scalar": torch.tensor(5), "none": whole[:0]}
    staging = Staging()
    staging.begin({"file": tensors}, {})
    whole.zero_()
    staging.finish()
    copies = staging.copies["file"]
    assert all(copy.is_contiguous() and not copy.requires_grad for copy in copies.values())
    assert len({copy.untyped_storage().data_ptr() for name, copy in copies.items() if name != "none"}) == 5
    assert torch.equal(copies["tied"], torch.arange(6.0).view(2, 3))
    assert torch.equal(copies["t"], torch.arange(6.0).view(2, 3).t())
    assert copies["scalar"] == 5


def test_memory_is_used_again_where_it_fits() -> None:
    staging = Staging()
    staging.begin({"file": {"a": torch.ones(4), "b": torch.ones(4)}}, {})
    place = staging.copies["file"]["a"].data_ptr()
    staging.begin({"file": {"a": torch.zeros(4), "b": torch.zeros(5), "c": torch.ones(1)}}, {})
    assert staging.copies["file"]["a"].data_ptr() == place
    assert torch.equal(staging.copies["file"]["a"], torch.zeros(4))
    assert torch.equal(staging.copies["file"]["b"], torch.zeros(5))
    staging.begin({"file": {"a": torch.zeros(4, dtype=torch.int64)}}, {})
    assert staging.copies["file"]["a"].dtype == torch.int64


def test_what_is_late_is_waited_for() -> None:
    staging, tensor = Staging(), torch.ones(3)
    staging.wait()
    staging.begin({}, {"late": {"a": tensor}})
    assert not staging._is_done.is_set()
    staging.finish()
    staging.wait()
    tensor.zero_()
    assert torch.equal(staging.copies["late"]["a"], torch.ones(3))


def test_what_is_late_and_changes_all_the_same_is_told_and_nobody_waits_for_ever() -> None:
    staging, tensor = Staging(), torch.ones(3)
    staging.begin({}, {"late": {"a": tensor}})
    tensor.add_(1)
    with pytest.raises(ChangedWhileCopied, match="late: changed outside"):
        staging.finish()
    staging.wait()
