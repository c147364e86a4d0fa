"""Copies that hold while the originals change, in memory that is used again."""

import torch

from lockstep.checkpoint.staging import Staging


def test_copies_are_contiguous_and_apart() -> None:
    whole = torch.arange(6.0).view(2, 3)
    parameter = torch.nn.Parameter(whole.clone())
    tensors = {"a": whole, "tied": whole, "t": whole.t(), "p": parameter, "scalar": torch.tensor(5), "none": whole[:0]}
    copies = Staging().copy({"file": tensors})["file"]
    whole.zero_()
    assert all(copy.is_contiguous() and not copy.requires_grad for copy in copies.values())
    assert len({copy.untyped_storage().data_ptr() for name, copy in copies.items() if name != "none"}) == 5
    assert torch.equal(copies["tied"], torch.arange(6.0).view(2, 3))
    assert torch.equal(copies["t"], torch.arange(6.0).view(2, 3).t())
    assert copies["scalar"] == 5


def test_memory_is_used_again_where_it_fits() -> None:
    staging = Staging()
    first = staging.copy({"file": {"a": torch.ones(4), "b": torch.ones(4)}})["file"]
    places = {name: copy.data_ptr() for name, copy in first.items()}
    second = staging.copy({"file": {"a": torch.zeros(4), "b": torch.zeros(5), "c": torch.ones(1)}})["file"]
    assert second["a"].data_ptr() == places["a"]
    assert torch.equal(second["a"], torch.zeros(4))
    assert torch.equal(second["b"], torch.zeros(5))
    third = staging.copy({"file": {"a": torch.zeros(4, dtype=torch.int64)}})["file"]
    assert third["a"].dtype == torch.int64
