"""Every model and contender that can be requested exists, and is the same each time."""

import pytest
import torch

from lockstep.bench.bench_models import build_workload
from lockstep.bench.contender_loops import LOOPS
from lockstep.bench.contenders import BENCH_MODELS, CONTENDERS, HAND_WRITTEN, fewest_lanes, make_contenders


@pytest.mark.parametrize("name", BENCH_MODELS)
def test_a_model_and_its_data_are_the_same_each_time(name: str) -> None:
    one, other = build_workload(name, 64, 0.1), build_workload(name, 64, 0.1)
    for mine, theirs in zip(one.data.tensors, other.data.tensors, strict=True):
        assert torch.equal(mine, theirs)
    model = one.make_model()
    torch.rand(1)  # earlier draws do not matter
    weights = other.make_model().state_dict()
    assert all(torch.equal(tensor, weights[key]) for key, tensor in model.state_dict().items())
    assert all(tensor.isfinite().all() for tensor in weights.values()), "or their difference would be NaN"
    assert any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())
    batch = [tensor[: BENCH_MODELS[name].batch] for tensor in one.data.tensors]
    loss_sum, count = one.loss_sum(model, batch)
    assert loss_sum.isfinite()
    assert count >= BENCH_MODELS[name].batch


def test_every_contender_has_its_rows_and_every_row_its_loop() -> None:
    rows = make_contenders(CONTENDERS, {"fabric": "Fabric 2"}, [1, 2, 8])
    assert {row.loop for row in rows} == LOOPS.keys() == {HAND_WRITTEN, *CONTENDERS}
    assert len({row.name for row in rows}) == len(rows)
    assert [row.title for row in make_contenders(["fabric"], {"fabric": "Fabric 2"}, [1])] == [
        "hand-written (DDP on several)",
        "the same again",
        "Fabric 2",
    ]


def test_a_contender_runs_on_no_more_processes_than_it_has_lanes() -> None:
    rows = {row.name: row for row in make_contenders(CONTENDERS, {}, [1, 2, 8])}
    assert [name for name, row in rows.items() if not row.can_run_on(2)] == ["lockstep-1"]
    assert [fewest_lanes(processes) for processes in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, 16]
