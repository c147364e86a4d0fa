"""Copies stay unchanged while the originals change, and their memory is reused."""

import pytest
import torch

from lockstep.checkpoint.host_copy import ChangedWhileCopiedError, HostCopies


def test_copies_are_contiguous_and_share_no_memory() -> None:
    whole = torch.arange(6.0).view(2, 3)
    parameter = torch.nn.Parameter(whole.clone())
    tensors = {"a": whole, "tied": whole, "t": whole.t(), "p": parameter, "scalar": torch.tensor(5), "none": whole[:0]}
    copies = HostCopies()
    copies.begin({"file": tensors}, {})
    whole.zero_()
    copies.finish()
    copies = copies.files["file"]
    assert all(copy.is_contiguous() and not copy.requires_grad for copy in copies.values())
    assert len({copy.untyped_storage().data_ptr() for name, copy in copies.items() if name != "none"}) == 5
    assert torch.equal(copies["tied"], torch.arange(6.0).view(2, 3))
    assert torch.equal(copies["t"], torch.arange(6.0).view(2, 3).t())
    assert copies["scalar"] == 5


def test_memory_is_reused_if_shape_and_dtype_match() -> None:
    copies = HostCopies()
    copies.begin({"file": {"a": torch.ones(4), "b": torch.ones(4)}}, {})
    place = copies.files["file"]["a"].data_ptr()
    copies.begin({"file": {"a": torch.zeros(4), "b": torch.zeros(5), "c": torch.ones(1)}}, {})
    assert copies.files["file"]["a"].data_ptr() == place
    assert torch.equal(copies.files["file"]["a"], torch.zeros(4))
    assert torch.equal(copies.files["file"]["b"], torch.zeros(5))
    copies.begin({"file": {"a": torch.zeros(4, dtype=torch.int64)}}, {})
    assert copies.files["file"]["a"].dtype == torch.int64


def test_late_copies_are_waited_for() -> None:
    copies, tensor = HostCopies(), torch.ones(3)
    copies.wait()
    copies.begin({}, {"late": {"a": tensor}})
    assert not copies._is_done.is_set()
    copies.finish()
    copies.wait()
    tensor.zero_()
    assert torch.equal(copies.files["late"]["a"], torch.ones(3))


def test_a_change_before_the_late_copy_is_an_error_and_wait_returns() -> None:
    copies, tensor = HostCopies(), torch.ones(3)
    copies.begin({}, {"late": {"a": tensor}})
    tensor.add_(1)
    with pytest.raises(ChangedWhileCopiedError, match="late: changed outside"):
        copies.finish()
    copies.wait()
