"""The trainer on one process: it learns, counts, and chooses a device only if the script named none."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.errors import Stopped, UserError
from lockstep.events.jsonl import read_jsonl
from lockstep.train import model_registry
from lockstep.train.optim.lr_schedule import Schedule
from lockstep.train.run import Run
from lockstep.train.trainer import Trainer
from lockstep.world.world import World
from tests.sinks import RecordingSink


def loader(count: int = 12, batch: int = 4) -> DataLoader[object]:
    inputs = torch.linspace(-1, 1, count).unsqueeze(1)
    return DataLoader(TensorDataset(inputs, 3 * inputs + 1), batch_size=batch)


def squared(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets, reduction="sum"), len(inputs)


def make(**options: object) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    metrics = lambda model, batch: {"error": squared(model, batch)}  # noqa: E731
    return Trainer(model, optimizer, squared, metrics, **options)  # type: ignore[arg-type]


def test_it_learns_a_line() -> None:
    trainer = make()
    history = trainer.train(loader(), loader(), epochs=60)
    assert len(history) == 60
    assert trainer.step == 180
    assert history[-1]["error"] < 1e-3 < history[0]["error"]
    assert trainer.model.weight.item() == pytest.approx(3, abs=0.1)  # type: ignore[union-attr, operator]


def test_steps_end_in_the_middle_of_an_epoch() -> None:
    trainer = make()
    assert [entry["step"] for entry in trainer.train(loader(), loader(), steps=5)] == [3, 5]


def test_either_epochs_or_steps() -> None:
    for given in ({}, {"epochs": 1, "steps": 1}):
        with pytest.raises(UserError, match="epochs= or steps="):
            make().train(loader(), **given)  # type: ignore[arg-type]


def test_the_last_step_is_always_shown() -> None:
    sink = RecordingSink()
    make(run=Run(None, World(), log_every=2, sinks=[sink])).train(loader(), steps=5)
    assert [event["step"] for event in sink.events if event["kind"] == "step"] == [2, 4, 5]


def test_every_rank_logs_its_timing(tmp_path: Path) -> None:
    run = Run(tmp_path / "a", World(), log_every=2, sinks=[])
    make(run=run).train(loader(), steps=5)
    run.close()
    lines = list(read_jsonl(tmp_path / "a" / "ranks" / "0.jsonl"))
    assert [line["step"] for line in lines] == [2, 4]
    assert {"data_s", "compute_s", "peak_host_bytes"} <= lines[0].keys()


def test_device_of_the_script_or_of_the_trainer() -> None:
    assert make(device="cpu").world.device == torch.device("cpu")
    chosen = make().world.device
    assert chosen.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert make(run=Run(None, World(device=torch.device("meta")))).model.weight.device.type == "meta"  # type: ignore[union-attr]


def test_evaluation_leaves_the_mode_as_it_was() -> None:
    trainer = make()
    trainer.model.train()
    trainer.evaluate(loader())
    assert trainer.model.training


def test_training_continues_where_it_left_off() -> None:
    trainer = make()
    trainer.train(loader(), epochs=1)
    trainer.train(loader(), epochs=1)
    assert trainer.step == 6


def test_a_run_with_a_folder_is_finished_by_the_trainer(tmp_path: Path) -> None:
    first = Run(tmp_path / "a", World(), sinks=[])
    make(run=first).train(loader(), epochs=2)
    (end,) = [event for event in read_jsonl(tmp_path / "a/events.jsonl") if event["kind"] == "end"]
    assert end["digest"] == first.digest()
    again = Run(tmp_path / "a", World(), sinks=[])
    trained = make(run=again)
    trained.train(loader(), epochs=2)
    assert (again.step, again.digest()) == (6, end["digest"]), "the same command has nothing left to do"


def test_two_calls_resume_in_the_second_one(tmp_path: Path) -> None:
    def train(folder: Path, stop_after: int | None = None) -> str:
        run = Run(folder, World(), sinks=[])
        run.stop_after = stop_after
        trainer = make(run=run)
        try:
            trainer.train(loader(), epochs=1)
            trainer.train(loader(), epochs=1)
        except Stopped:
            run.close()
        return run.digest()

    train(tmp_path / "stopped", stop_after=5)
    assert train(tmp_path / "stopped") == train(tmp_path / "whole")


def test_an_empty_loader_is_an_error() -> None:
    with pytest.raises(UserError, match="empty"):
        make().train(DataLoader([]), steps=1)  # type: ignore[arg-type]


def test_every_epoch_is_announced_to_the_sampler() -> None:
    epochs: list[int] = []

    class Announced(torch.utils.data.SequentialSampler):
        def set_epoch(self, epoch: int) -> None:
            epochs.append(epoch)

    dataset = loader().dataset
    make().train(DataLoader(dataset, batch_size=4, sampler=Announced(dataset)), epochs=3)  # type: ignore[arg-type]
    assert epochs == [0, 1, 2]


def test_evaluation_is_in_evaluation_mode() -> None:
    trainer = make()
    modes: list[bool] = []
    trainer._metrics = lambda model, _: (modes.append(model.training), {})[1]
    trainer.model.train()
    trainer.evaluate(loader())
    assert set(modes) == {False}


def test_a_config_file_a_model_by_name_and_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_registry, "_models", {})

    @lockstep.register_model("line")
    class Line(nn.Module):
        def __init__(self, config: lockstep.Config) -> None:
            super().__init__()
            self.layer = nn.Linear(config.model.inputs, 1)

        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": F.mse_loss(self.layer(inputs), targets)}

    (tmp_path / "config.yaml").write_text("epochs: 30\nbatch: {global: 4}\nmodel: {name: line, inputs: 1}\n")
    config = lockstep.Config.from_file(tmp_path / "config.yaml", ["epochs=40"])
    model = lockstep.get_model(config.model.name)(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    history = lockstep.Trainer(model, optimizer, device="cpu").train(loader(), loader(), epochs=config.epochs)
    assert len(history) == 40
    assert history[-1]["loss"] < 1e-3 < history[0]["loss"]


def test_the_history_is_saved_and_strict_json_even_with_a_nan(tmp_path: Path) -> None:
    run = Run(tmp_path / "a", World(), sinks=[])
    trainer = make(run=run)
    trainer._metrics = lambda *_: {"error": (float("nan"), 1)}
    trainer.train(loader(), loader(), epochs=2)
    run.close()
    entries = json.loads((tmp_path / "a" / "history.json").read_text(), parse_constant=pytest.fail)
    assert [(entry["step"], entry["epoch"], entry["error"]) for entry in entries] == [(3, 1, "nan"), (6, 2, "nan")]


def test_the_mean_loss_is_over_the_steps_since_the_last_evaluation() -> None:
    sink = RecordingSink()
    trainer = make(run=Run(None, World(), log_every=1, sinks=[sink]))
    trainer.train(loader(), epochs=2)
    losses = [event["loss"] for event in sink.events if event["kind"] == "step"]
    assert [entry["train_loss"] for entry in trainer.history] == pytest.approx(
        [sum(losses[:3]) / 3, sum(losses[3:]) / 3]
    )


def test_the_average_is_evaluated_if_there_is_one() -> None:
    trainer = make()
    trainer.ema = trainer.run.ema(trainer.model, 0.9, warmup=False)
    trainer.train(loader(), loader(), epochs=1)
    averaged = trainer.evaluate(loader())["error"]
    trainer.ema = None
    assert trainer.evaluate(loader())["error"] != averaged
    assert trainer.history[0]["error"] == averaged


def test_steps_are_logged_with_rate_and_norm() -> None:
    sink = RecordingSink()
    run = Run(None, World(), log_every=1, sinks=[sink], clip_norm=1e-3)
    trainer = make(run=run, schedule=Schedule.constant(warmup=4))
    trainer.train(loader(), epochs=1)
    steps = [event for event in sink.events if event["kind"] == "step"]
    assert [event["lr"] for event in steps] == pytest.approx([0.075, 0.15, 0.225])
    assert all(event["gradient_norm"] > 1e-3 for event in steps)
    assert "loss_scale" not in steps[0]


@pytest.mark.parametrize("every", ["0 epochs", 0, "0 samples"])
def test_evaluating_all_the_time_is_refused(every: str | int) -> None:
    with pytest.raises(UserError, match=f"evaluate_every={every}: expected a duration greater than 0"):
        make().train(loader(), epochs=2, evaluate_every=every)


def test_an_invalid_duration_is_refused() -> None:
    with pytest.raises(UserError, match="evaluate_every: expected a duration, as in 500 steps"):
        make().train(loader(), epochs=2, evaluate_every="2 weeks")


def test_an_average_that_nothing_would_update_is_refused() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserError, match=r"ema= takes what run\.ema\(model, decay\) returns"):
        Trainer(model, optimizer, squared, ema=lockstep.ExponentialMovingAverage(model))
    run = Run(None, World())
    with pytest.raises(UserError, match=r"call run\.prepare\(model\) before run\.ema"):
        run.ema(model)
    run.prepare(model)
    trainer = Trainer(model, optimizer, squared, ema=run.ema(model, 0.9), run=run)
    trainer.train(loader(), loader(), epochs=1)
    assert trainer.ema is not None
    assert trainer.ema.num_updates == 3
    assert sorted(name.split("/")[0] for name in run.state()) == ["average"] * 3 + ["model"] * 2, "prepared once"


def test_a_loss_for_padded_lanes_is_a_metric_too() -> None:
    def weighted(
        model: nn.Module, batch: list[torch.Tensor], weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = batch
        return (weight * (model(inputs) - targets).square().squeeze(1)).sum(), weight.sum()

    model = nn.Linear(1, 1)
    run = Run(None, World())
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), weighted, run=run)
    data = loader(10).dataset
    history = trainer.train(run.loader(data, 4, lanes=2, tail="pad"), loader(10), epochs=1)
    expected = run.evaluate(model, data, lambda model, batch: {"loss": squared(model, batch)})
    assert history[-1]["loss"] == pytest.approx(expected["loss"])
