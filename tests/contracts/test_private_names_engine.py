"""The private names of torch that the engine relies on exist, and mean what they did; their fallbacks agree.

A failure here names the installed torch version. Look at what that version changed, and adapt
`lockstep/engine/torch_internals.py`, the only file of the engine that uses these names.
"""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import graph
from torch.nn.modules import batchnorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from lockstep.config.tested_versions import TESTED_TORCH_VERSIONS
from lockstep.engine import torch_internals
from lockstep.engine.gradient_math import all_finite, scale_gradients
from lockstep.engine.stand_in_gradient import ShardedGradient
from lockstep.errors import UserError
from lockstep.testing import ranks
from lockstep.world.world import World

VERSION = f"torch {torch.__version__}, seen in {' and '.join(TESTED_TORCH_VERSIONS)}"

LIST_OPERATIONS = ("_foreach_add_", "_foreach_copy_", "_foreach_lerp_", "_foreach_mul_", "_foreach_norm")
FINITE_CHECK = "_amp_foreach_non_finite_check_and_unscale_"


@pytest.mark.parametrize("name", [*LIST_OPERATIONS, FINITE_CHECK])
def test_list_operations_exist(name: str) -> None:
    assert hasattr(torch, name), f"{name}: {VERSION}"


def test_autograd_and_modules_have_their_private_names() -> None:
    owners = {
        "_engine_run_backward": graph,
        "_BatchNorm": batchnorm,
        "_NormBase": batchnorm,
        "_check_reducer_finalized": DistributedDataParallel,
        "_version": torch.zeros(1),
        "_values": torch.zeros(1),
        "_buffers": nn.Linear(1, 1),
        "_compiled_call_impl": nn.Linear(1, 1),
        "_optimizer_step_pre_hooks": SGD(nn.Linear(1, 1).parameters()),
        "_optimizer_step_post_hooks": SGD(nn.Linear(1, 1).parameters()),
    }
    assert [name for name, owner in owners.items() if not hasattr(owner, name)] == [], VERSION


def test_batch_norm_is_recognised_without_its_base_class(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.SyncBatchNorm(2), nn.InstanceNorm1d(2), nn.LayerNorm(2)]
    for base in (batchnorm._BatchNorm, None):
        monkeypatch.setattr(torch_internals, "_batch_norm_base", base)
        assert [torch_internals.is_batch_norm(module) for module in modules] == [True, True, True, False, False]


def test_the_module_inside_a_compiled_one_is_found() -> None:
    bare = nn.Linear(1, 1)
    wrapped = torch.compile(bare, backend="eager")
    assert torch_internals.compiled_child(wrapped) is bare, VERSION  # type: ignore[arg-type]
    assert torch_internals.compiled_child(bare) is None
    assert list(wrapped.state_dict()) == [f"{torch_internals.COMPILED_CHILD}.{name}" for name in bare.state_dict()]  # type: ignore[attr-defined]
    assert not torch_internals.is_compiled_in_place(bare)
    bare.compile(backend="eager")
    assert torch_internals.is_compiled_in_place(bare), VERSION


def test_versions_count_changes_in_place() -> None:
    tensor = torch.zeros(2)
    before = torch_internals.version_of(tensor)
    tensor.add_(1.0)
    assert torch_internals.version_of(tensor) == before + 1, VERSION
    weight = nn.Parameter(torch.ones(2))
    weight.sum().backward()
    assert weight.grad is not None
    first, version = weight.grad, torch_internals.version_of(weight.grad)
    weight.sum().backward()
    assert weight.grad is first and torch_internals.version_of(first) > version, f"autograd adds in place: {VERSION}"


def numbers(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes: list[tuple[int, ...]] = [(7,), (3, 5), (), (40, 33)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_fallbacks_of_list_operations_have_the_same_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def computed() -> list[Tensor]:
        added, scaled, copied = numbers(dtype), numbers(dtype), [torch.empty_like(each) for each in numbers(dtype)]
        torch_internals.add_all_(added, [each.clone() for each in scaled])
        scale_gradients(scaled, torch.tensor(1 / 37, dtype=torch.float64))
        torch_internals.copy_all_(copied, added)
        moved = numbers(dtype)
        torch_internals.interpolate_all_(moved, added, 0.01)
        return [*added, *scaled, *copied, *moved]

    fused = computed()
    for name in LIST_OPERATIONS:
        monkeypatch.delattr(torch, name)
    assert all(torch.equal(a, b) for a, b in zip(fused, computed(), strict=True)), VERSION


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_fallbacks_of_the_finite_check_agree(dtype: torch.dtype, bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    good, spoilt = numbers(dtype), numbers(dtype)
    spoilt[1][0, 0] = bad
    for is_fallback in (False, True):
        if is_fallback:
            for name in (*LIST_OPERATIONS, FINITE_CHECK):
                monkeypatch.delattr(torch, name)
        assert (all_finite(good), all_finite(spoilt)) == (True, False), VERSION
    assert all(torch.equal(a, b) for a, b in zip(good, numbers(dtype), strict=True)), "the check changes nothing"


def test_the_fallback_of_the_backward_pass_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients() -> list[Tensor | None]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        losses = [model(torch.ones(4, 5)).square().sum(), model(torch.zeros(4, 5)).sum()]
        inputs = [model[0].weight, model[2].bias]
        torch_internals.backward_without_checks(
            losses, [torch.tensor(0.3), torch.tensor(1.7)], retain_graph=False, inputs=inputs
        )
        return [parameter.grad for parameter in model.parameters()]

    direct = gradients()
    assert [gradient is not None for gradient in direct] == [True, False, False, True]
    monkeypatch.setattr(torch_internals, "_engine_run_backward", None)
    for ours, theirs in zip(direct, gradients(), strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs), VERSION  # type: ignore[arg-type]


def test_the_fallback_knows_every_norm_with_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    norms = [nn.BatchNorm1d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2), nn.InstanceNorm2d(2), nn.LazyBatchNorm2d()]
    others = [nn.LayerNorm(2), nn.GroupNorm(1, 2), nn.Linear(2, 2)]
    for base in (batchnorm._NormBase, None):
        monkeypatch.setattr(torch_internals, "_norm_base", base)
        assert all(map(torch_internals.has_running_statistics, norms)), VERSION
        assert not any(map(torch_internals.has_running_statistics, others)), VERSION


def test_empty_buffers_are_listed_and_can_be_replaced() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("empty", None)
    assert torch_internals.buffer_names(module) == ["running_mean", "running_var", "num_batches_tracked", "empty"]
    assert torch_internals.get_buffer(module, "empty") is None
    other = torch.ones(2)
    torch_internals.set_buffer(module, "running_mean", other)
    assert module.running_mean is other, VERSION
    assert module.state_dict()["running_mean"].tolist() == [1.0, 1.0]


def test_sparse_values_are_not_coalesced() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([3e38, 3e38]), (2,), check_invariants=True)
    assert torch_internals.stored_values(sparse).tolist() == torch.tensor([3e38, 3e38]).tolist(), VERSION


def sharded_class(world: World) -> tuple[str, str]:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model)
    return type(model).__name__, torch_internals.class_before_sharding(model).__name__


def test_the_class_before_sharding_is_found_again() -> None:
    assert torch_internals.class_before_sharding(nn.Linear(1, 1)) is nn.Linear
    for sharded, original in ranks(2).run(sharded_class):
        assert sharded != "Sequential", VERSION
        assert original == "Sequential", VERSION


def reduced_all(world: World) -> list[bool]:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            result: Tensor = self.used(inputs)
            return result

    answers = []
    for find_unused in (True, False):
        ddp = DistributedDataParallel(Two(), find_unused_parameters=find_unused)
        ddp(torch.ones(1, 2)).sum().backward()
        answers.append(torch_internals.has_reduced_every_bucket(ddp))
    return answers


def test_a_reducer_that_waits_for_a_gradient_is_noticed() -> None:
    for answers in ranks(2).run(reduced_all):
        assert answers == [True, False], VERSION


def test_a_copy_of_an_optimizer_runs_its_hooks_and_satisfies_schedulers() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = SGD([weight], lr=0.1)
    scheduler = StepLR(optimizer, 1)
    other, calls = copy.copy(optimizer), []
    torch_internals.share_step_hooks(optimizer, other)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    weight.grad = torch.ones(1)
    other.step()
    assert calls == ["pre", "post"], VERSION
    torch_internals.mark_as_stepped(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()  # warns where it does not know of a step


def test_a_loss_that_is_a_mean_is_recognised_by_its_graph() -> None:
    outputs, labels = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0])
    each = F.cross_entropy(outputs, labels, reduction="none")
    means = {
        "cross_entropy": F.cross_entropy(outputs, labels),
        "label smoothing": F.cross_entropy(outputs, labels, label_smoothing=0.1),
        "mse_loss": F.mse_loss(outputs, torch.zeros(4, 3)),
        "mean": each.mean(),
        "a sum of means": each.mean() + F.l1_loss(outputs, torch.zeros(4, 3)),
        "a quotient": each.sum() / 4,
        "another dtype": each.mean().double(),
        "another shape": each.mean().view(1).squeeze(),
        "a negative mean": -each.mean(),
        "a difference of means": each.mean() - outputs.mean(),
        "one minus a mean": 1 - each.mean(),
        "a root of a mean": F.mse_loss(outputs, torch.zeros(4, 3)).sqrt(),
        "half of a mean": 0.5 * each.mean() + each.mean() / 2,
        "a limited mean": each.mean().clamp(max=10),
    }
    sums = {
        "cross_entropy": F.cross_entropy(outputs, labels, reduction="sum"),
        "sum": each.sum(),
        "a mean times its count": each.mean() * 4,
        "in another unit": each.sum() / 0.6931,
        "a sum and a mean": each.sum() + outputs.mean(),
        "a sum of samples' means": sum(F.mse_loss(row, torch.zeros(3)) for row in outputs),
        "a sum of very many means": sum(each.mean() for _ in range(2000)),
        "a mean times a trained weight": each.mean() * outputs.exp().sum(),
        "no graph": torch.zeros(()),
    }
    assert [name for name, loss in means.items() if not torch_internals.is_mean(loss, 4)] == [], VERSION
    assert [name for name, loss in sums.items() if torch_internals.is_mean(loss, 4)] == [], VERSION


def test_a_tensor_without_values_can_be_a_gradient() -> None:
    parameter = nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    parameter.grad = ShardedGradient(parameter)
    for use in (
        lambda: nn.utils.clip_grad_norm_([parameter], 1.0),
        lambda: nn.utils.clip_grad_value_([parameter], 1.0),
        lambda: parameter.grad.norm(),  # type: ignore[union-attr]
        lambda: str(parameter.grad),
        lambda: (parameter * 1).sum().backward(),
    ):
        with pytest.raises(UserError, match="the gradients are sharded"):
            use()
    SGD([parameter]).zero_grad()
    assert parameter.grad is None
