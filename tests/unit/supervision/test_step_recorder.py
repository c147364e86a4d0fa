"""What the step recorder writes about each update of a plain PyTorch loop, and when it ends the script."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DistributedSampler

from lockstep.supervision import step_recorder
from lockstep.supervision.batch_rows import RecordedRow, record_rows
from lockstep.supervision.io_recorder import OutputRecord
from lockstep.supervision.step_recorder import MAX_KEPT_VALUES


class Wrapper(nn.Module):
    """Wraps a model as DistributedDataParallel does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Classifier(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[OutputRecord]:
    files = OutputRecord(tmp_path, 0)
    yield files
    step_recorder.replace_recorder_by_run(None)


def recorded(files: OutputRecord) -> list[dict[str, Any]]:
    return [json.loads(line) for line in files.updates.read_text().splitlines()]


def update(model: nn.Module, optimizer: torch.optim.Optimizer, *batches: torch.Tensor, **kwargs: Any) -> None:
    optimizer.zero_grad()
    for batch in batches:
        logits = model(inputs=batch) if kwargs.get("by_name") else model(batch)
        nn.CrossEntropyLoss()(logits, torch.zeros(len(batch), dtype=torch.long)).backward()
    optimizer.step()


@pytest.mark.parametrize("by_name", [False, True])
def test_an_update_is_recorded(files: OutputRecord, by_name: bool) -> None:
    torch.manual_seed(0)
    model = Wrapper(Classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step_recorder.record_steps(files, num_steps=9, num_ranks=1)
    first, second = torch.randn(4, 4), torch.randn(2, 4)
    update(model, optimizer, first, second, by_name=by_name)
    with torch.no_grad():
        model(torch.randn(5, 4))  # an evaluation, which is not recorded
    update(model, optimizer, first.flip(0), by_name=by_name)
    one, two = recorded(files)
    assert [one["step"], two["step"]] == [1, 2]
    rows = [row[0] for row in one["phases"]["rows"]["rows"]]
    assert len(set(rows)) == 6, "the rows of both batches, but neither of the logits nor of the evaluation"
    assert [row[0] for row in two["phases"]["rows"]["rows"]] == rows[3::-1]
    assert set(one["phases"]["gradient"]) == {f"{layer}.{kind}" for layer in "013" for kind in ("weight", "bias")}
    assert one["phases"]["rates"] == {"learning rate 0": "0.1", "weight decay 0": "0.0", "momentum 0": "0.0"}
    assert one["phases"]["start"].keys() == one["phases"]["weights"].keys()
    assert one["phases"]["start"]["3.weight"] != one["phases"]["weights"]["3.weight"]
    assert two["phases"]["start"] == one["phases"]["weights"]
    assert "start/3.weight" in load_file(files.values(1))
    assert "start/3.weight" not in load_file(files.values(2)), "they are those after the first update"
    assert set(one["phases"]["buffers"]) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert one["layers"] == ["BatchNorm1d", "Dropout", step_recorder.RANDOM_NUMBERS]
    kept = load_file(files.values(2))
    torch.testing.assert_close(kept["weights/3.bias"], model.module[3].bias.detach(), rtol=0, atol=0)
    torch.testing.assert_close(kept["gradient/3.bias"], model.module[3].bias.grad, rtol=0, atol=0)


def test_layers_that_draw_or_mix_nothing_are_not_named(files: OutputRecord) -> None:
    class Attention(nn.Module):
        def __init__(self, dropout: float) -> None:
            super().__init__()
            self.dropout = dropout

    frozen = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)).eval()
    none = [nn.Dropout(p=0), nn.Dropout(0.0), nn.SyncBatchNorm(4), nn.GRU(4, 4, dropout=0), frozen, Attention(0.0)]
    assert not [layer for layer in none for part in layer.modules() if step_recorder._mixes_or_draws(part)]
    some = [nn.Dropout(0.1), nn.BatchNorm1d(4), nn.GRU(4, 4, num_layers=2, dropout=0.1), Attention(0.1), nn.Dropout2d()]
    assert all(step_recorder._mixes_or_draws(layer) for layer in some)


def test_weights_that_are_changed_between_updates_are_recorded_again(files: OutputRecord) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step_recorder.record_steps(files, num_steps=9, num_ranks=1)
    update(model, optimizer, torch.randn(4, 4))
    model.bias.data += 1.0
    update(model, optimizer, torch.randn(4, 4))
    one, two = recorded(files)
    assert one["phases"]["weights"]["weight"] == two["phases"]["start"]["weight"]
    assert one["phases"]["weights"]["bias"] != two["phases"]["start"]["bias"]
    assert {name for name in load_file(files.values(2)) if name.startswith("start/")} == {"start/bias"}


def test_a_sampler_that_begins_an_epoch_twice_is_noticed(files: OutputRecord) -> None:
    begin = DistributedSampler.__iter__
    step_recorder.record_steps(files, num_steps=9, num_ranks=1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    right, ordered, wrong = (
        DistributedSampler(range(4), num_replicas=2, rank=0, shuffle=shuffle) for shuffle in (True, False, True)
    )
    for epoch in range(2):
        right.set_epoch(epoch)
        assert len(list(right)) == len(list(ordered)) == 2
    optimizer.step()
    for _ in range(3):
        list(wrong)
        optimizer.step()
        optimizer.step()
    assert [line["repeated_epoch"] for line in recorded(files)] == [None] * 3 + [[2, 4]] * 4
    step_recorder.replace_recorder_by_run(None)
    assert DistributedSampler.__iter__ is begin


def test_a_sampler_made_anew_for_each_epoch_is_noticed(files: OutputRecord) -> None:
    step_recorder.record_steps(files, num_steps=9, num_ranks=1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    samples = range(4)
    for _ in range(2):
        list(DistributedSampler(samples, num_replicas=2, rank=0))
        optimizer.step()
        optimizer.step()
    assert recorded(files)[-1]["repeated_epoch"] == [1, 3]


def test_an_epoch_counts_only_if_it_is_trained(files: OutputRecord) -> None:
    step_recorder.record_steps(files, num_steps=9, num_ranks=1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    sampler = DistributedSampler(range(4), num_replicas=2, rank=0)
    next(iter(sampler))  # to look at a sample
    for epoch in range(2):
        sampler.set_epoch(epoch)
        list(sampler)
        optimizer.step()
        with torch.no_grad():  # an evaluation, here in the middle of the epoch
            list(sampler)
        optimizer.step()
        list(sampler)  # at its end
    assert recorded(files)[-1]["repeated_epoch"] is None


def test_the_order_of_an_epoch_that_is_a_single_update_does_not_matter(files: OutputRecord) -> None:
    step_recorder.record_steps(files, num_steps=9, num_ranks=1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    sampler = DistributedSampler(range(4), num_replicas=2, rank=0)
    for _ in range(3):
        list(sampler)
        optimizer.step()
    assert recorded(files)[-1]["repeated_epoch"] is None


class Words(nn.Module):
    """Embeds positions before words."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.words, self.block = nn.Embedding(5, 4), nn.Embedding(9, 4), Block()

    def forward(self, words: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        embedded = self.positions(torch.arange(5)) + self.words(words)
        return checkpoint(self.block, embedded, torch.ones(5, 1), use_reentrant=False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, embedded: torch.Tensor, mask: torch.Tensor) -> Any:
        return F.dropout(self.linear(embedded * mask), 0.0)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_rows_are_those_of_named_arguments_and_not_of_positions_or_masks(files: OutputRecord, is_wrapped: bool) -> None:
    model: nn.Module = Wrapper(Words()) if is_wrapped else Words()
    step_recorder.record_steps(files, num_steps=9, num_ranks=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = torch.arange(15).reshape(3, 5) % 9
    model(mask=torch.ones(3), words=words).sum().backward()
    optimizer.step()
    (line,) = recorded(files)
    assert [RecordedRow(*row) for row in line["phases"]["rows"]["rows"]] == record_rows(words)
    assert line["layers"] == []


def test_a_model_that_draws_random_numbers(files: OutputRecord) -> None:
    class Noisy(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return F.dropout(super().forward(inputs), 0.5)

    model = Noisy(4, 3)
    step_recorder.record_steps(files, num_steps=9, num_ranks=1)
    update(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 4))
    assert recorded(files)[0]["layers"] == [step_recorder.RANDOM_NUMBERS]


def test_the_settings_of_each_group_are_recorded(files: OutputRecord) -> None:
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    step_recorder.record_steps(files, num_steps=9, num_ranks=1)
    groups = [{"params": [first], "lr": torch.tensor(0.5)}, {"params": [second], "weight_decay": 0.25}]
    torch.optim.AdamW(groups, lr=1.0, weight_decay=0.0, betas=(0.5, 0.75)).step()
    assert recorded(files)[0]["phases"]["rates"] == {
        "learning rate 0": "0.5",
        "weight decay 0": "0.0",
        "pair of betas 0": "0.5 0.75",
        "learning rate 1": "1.0",
        "weight decay 1": "0.25",
        "pair of betas 1": "0.5 0.75",
    }


def test_several_models_and_parameters_without_a_model(files: OutputRecord) -> None:
    first, second, alone = nn.Linear(2, 2), nn.Linear(2, 1), nn.Parameter(torch.ones(3))
    step_recorder.record_steps(files, num_steps=9, num_ranks=1)
    optimizer = torch.optim.SGD([{"params": [*first.parameters(), *second.parameters()]}, {"params": [alone]}], lr=0.1)
    (second(first(torch.ones(4, 2))).sum() + alone[0]).backward()
    optimizer.step()
    (line,) = recorded(files)
    names = ["weight", "bias", "model 2: weight", "model 2: bias", "group 1, parameter 0"]
    assert list(line["phases"]["gradient"]) == names
    assert len(line["phases"]["rows"]["rows"]) == 4, "what the first model computes is not data"


def test_some_values_of_a_large_tensor_are_kept_and_all_are_in_its_digest(files: OutputRecord) -> None:
    parameter = nn.Parameter(torch.zeros(3 * MAX_KEPT_VALUES, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    step_recorder.record_steps(files, num_steps=9, num_ranks=1)
    for place in (1, 2):
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad[place] = 1.0
        optimizer.step()
    one, two = recorded(files)
    assert one["phases"]["gradient"] != two["phases"]["gradient"]
    assert load_file(files.values(1))["gradient/group 0, parameter 0"].shape == (MAX_KEPT_VALUES,)


def test_a_parameter_without_a_gradient(files: OutputRecord) -> None:
    step_recorder.record_steps(files, num_steps=9, num_ranks=1)
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()
    assert recorded(files)[0]["phases"]["gradient"] == {"group 0, parameter 0": "none"}


def test_it_ends_the_script_once_all_ranks_have_arrived(files: OutputRecord) -> None:
    OutputRecord(files.folder, 1).end.touch()
    step_recorder.record_steps(files, num_steps=1, num_ranks=2)
    with pytest.raises(SystemExit) as end:
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()
    assert end.value.code == 0
    assert files.end.exists()


def test_a_script_that_ends_by_itself_lets_the_other_ranks_end(
    files: OutputRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr("atexit.register", at_exit.append)
    step_recorder.record_steps(files, num_steps=9, num_ranks=2)
    assert not files.end.exists()
    at_exit[0]()
    assert files.end.exists()


@pytest.mark.parametrize("how", ["", "parameters", "autocast"])
def test_low_precision_is_noticed(files: OutputRecord, how: str) -> None:
    dtype = torch.bfloat16 if how == "parameters" else torch.float32
    model = nn.Linear(4, 3, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step_recorder.record_steps(files, num_steps=9, num_ranks=1)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
        model(torch.ones(2, 4, dtype=dtype)).sum().backward()
    optimizer.step()
    assert recorded(files)[0]["has_low_precision"] == bool(how)


def test_a_lockstep_loop_is_not_recorded(files: OutputRecord) -> None:
    step_recorder.record_steps(files, num_steps=1, num_ranks=1)
    step_recorder.replace_recorder_by_run(None)
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()
    assert not files.updates.exists()


def test_an_optimizer_inside_another_is_not_an_update(files: OutputRecord) -> None:
    class Outer(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            inner.step()

    model = nn.Linear(2, 1)
    inner, outer = torch.optim.SGD(model.parameters(), lr=0.1), Outer(model.parameters(), lr=0.1)
    step_recorder.record_steps(files, num_steps=9, num_ranks=1)
    model(torch.ones(3, 2)).sum().backward()
    outer.step()
    (line,) = recorded(files)
    assert len(line["phases"]["rows"]["rows"]) == 3
