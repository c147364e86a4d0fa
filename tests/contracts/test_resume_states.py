"""What a script may change, save and request between two attempts of a run, and within one."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset, TensorDataset

from lockstep.checkpoint import async_saver
from lockstep.checkpoint.checkpoint_contents import checkpoint_digest
from lockstep.checkpoint.checkpoint_store import CheckpointStore
from lockstep.checkpoint.ledger import read_ledger
from lockstep.checkpoint.manifest import StoredFile
from lockstep.data.evaluation_loader import EvaluationLoader
from lockstep.errors import Stopped, UserError
from lockstep.events.jsonl import read_jsonl
from lockstep.events.run_folder import RunFolder
from lockstep.recipes.registry import load_recipe
from lockstep.testing import RanksFailed, ranks
from lockstep.train.callbacks import Callback, EarlyStopping, SaveBest
from lockstep.train.optim.optimizer_classes import find_optimizer, usable_optimizers
from lockstep.train.resume.checkpoint_policy import CheckpointPolicy
from lockstep.train.run import Run
from lockstep.train.train_job import train_recipe
from lockstep.train.trainer import Trainer
from lockstep.world.world import World
from tests.classification import DATA, loss
from tests.commands import LOCKSTEP, run


class Script:
    """A custom training loop on one process."""

    def __init__(
        self,
        folder: Path | None,
        model: Callable[[], nn.Module] = lambda: nn.Linear(4, 3),
        optimizer: Callable[..., Optimizer] = torch.optim.SGD,
        data: Any = DATA,
        resume: Any = "auto",
        loader: Mapping[str, Any] = {},
        **settings: Any,
    ) -> None:
        self.run = Run(folder, World(), seed=1, sinks=[], resume=resume)
        self.model = self.run.prepare(model())
        self.optimizer = self.run.optimizer(self.model, lambda params: optimizer(params, **{"lr": 0.1, **settings}))
        self.loader = self.run.loader(data, 16, lanes=4, **loader)
        self.made: list[int] = []

    def train(self, steps: int, stop_after: int | None = None) -> str:
        """Train until the end or the stop; return the digest."""
        self.run.stop_after = stop_after
        try:
            for step in self.run.steps(self.loader, steps=steps):
                self.make(step)
        except Stopped:
            self.run.close()
        return self.run.digest()

    def make(self, step: Any) -> None:
        step.accumulate(loss, self.model)
        step.update(self.optimizer)
        self.made.append(step.number)


def checkpoints(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints")


def lower_the_rate(script: Script) -> None:
    script.optimizer.param_groups[0]["lr"] = 0.01


def take_another_optimizer(script: Script) -> None:
    script.optimizer = script.run.optimizer(script.model, lambda params: torch.optim.Adam(params, lr=0.01))


def train_twice(
    folder: Path | None, between: Callable[[Script], None], stop_after: int | None = None
) -> tuple[str, list[int]]:
    """Train with two calls of `run.steps`, each of which finishes the run."""
    script = Script(folder, momentum=0.9)
    script.train(3, stop_after)
    if stop_after is None or stop_after > 3:
        between(script)
        script.train(3, stop_after)
    return script.run.digest(), script.made


@pytest.mark.parametrize("between", [lower_the_rate, take_another_optimizer])
def test_what_a_script_changes_between_two_loops_is_kept(between: Callable[[Script], None], tmp_path: Path) -> None:
    whole, made = train_twice(None, between)
    assert train_twice(tmp_path / "whole", between) == (whole, made)
    for stop in range(1, 6):
        folder = tmp_path / str(stop)
        first = train_twice(folder, between, stop)[1]
        digest, rest = train_twice(folder, between)
        assert (digest, first + rest) == (whole, made), f"stopped after {stop}"
        lines = list(read_ledger(folder / "ledger.jsonl"))
        assert [line["parent"] for line in lines] == [None, *(line["commit"] for line in lines[:-1])]
        assert 0 not in [line["step"] for line in lines], "a loop that was skipped has nothing to save"


def test_a_script_that_lost_a_loop_is_refused(tmp_path: Path) -> None:
    train_twice(tmp_path / "run", lower_the_rate)
    script = Script(tmp_path / "run", momentum=0.9)
    for step in script.run.steps(script.loader, steps=3, finish=False):
        script.make(step)
    with pytest.raises(UserError, match=r"saved in a later call of run.steps\(…\) than this script makes: restore"):
        script.run.finish()
    script.run.close()
    assert checkpoints(tmp_path / "run").steps() == [6, 3]


def test_a_save_requested_in_the_loop_has_the_requested_options(tmp_path: Path) -> None:
    script = Script(tmp_path / "run")
    for step in script.run.steps(script.loader, steps=4, save_every=2):
        script.make(step)
        if step.number in (1, 2):
            script.run.save(is_best=True, metrics={"accuracy": step.number})
            script.run.save(note="again")
    store = checkpoints(tmp_path / "run")
    assert (store.steps(), store.best()) == ([4, 2, 1], 2)
    assert [store.manifest(step).facts.get("metrics") for step in (1, 2, 4)] == [{"accuracy": 1}, {"accuracy": 2}, None]
    assert store.manifest(1).facts["note"] == "again"


@pytest.mark.parametrize("end", ["close", "finish"])
def test_a_requested_save_is_made_even_if_the_loop_is_left(end: str, tmp_path: Path) -> None:
    script = Script(tmp_path / "run")
    for step in script.run.steps(script.loader, steps=4):
        script.make(step)
        if step.number == 2:
            script.run.save(is_best=True)
            break
    getattr(script.run, end)()
    assert checkpoints(tmp_path / "run").best() == 2


def test_there_is_nothing_to_save_before_the_first_loop(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"after run.steps\(…\) has begun"):
        Script(tmp_path / "run").run.save()
    Script(None).run.save()


def test_after_its_end_a_run_saves_and_logs_nothing(tmp_path: Path) -> None:
    script = Script(tmp_path / "run")
    digest = script.train(2)
    script.run.save()
    assert script.run.finish() == digest
    with pytest.raises(UserError, match=r"run.log\(…\) after the run's end"):
        script.run.log(loss=1.0)
    assert checkpoints(tmp_path / "run").steps() == [2]


def test_a_stop_at_a_step_already_reached_stops_at_once(tmp_path: Path) -> None:
    Script(tmp_path / "run").train(6, stop_after=3)
    for stop in (3, 2):
        again = Script(tmp_path / "run")
        again.run.stop_after = stop
        with pytest.raises(Stopped, match="after step 3"):
            list(again.run.steps(again.loader, steps=6))
        again.run.close()


class Numbers(IterableDataset[tuple[Tensor, int]]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for number in range(self.length):
            yield torch.full((4,), number / 100), number % 3


def train_on_each(datasets: Sequence[Any], folder: Path | None, stop_after: int | None = None) -> str:
    script = Script(folder, momentum=0.9)
    script.run.stop_after = stop_after
    try:
        for dataset in datasets:
            for step in script.run.steps(script.run.loader(dataset, 16, lanes=4), steps=2, finish=False):
                script.make(step)
        script.run.finish()
    except Stopped:
        script.run.close()
    return script.run.digest()


@pytest.mark.parametrize("datasets", [(Numbers(40), DATA), (DATA, Numbers(40)), (Numbers(40), Numbers(56))])
def test_each_loop_has_its_own_data(datasets: Sequence[Any], tmp_path: Path) -> None:
    """A saved position in one stream must not be used for the next."""
    whole = train_on_each(datasets, None)
    for stop in (1, 2, 3):
        train_on_each(datasets, tmp_path / str(stop), stop)
        assert train_on_each(datasets, tmp_path / str(stop)) == whole, f"stopped after {stop}"


def train_with(callbacks: Sequence[Callback], folder: Path, stop_after: int | None = None) -> Trainer:
    run = Run(folder, World(), sinks=[])
    run.stop_after = stop_after
    model = nn.Linear(4, 3)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, callbacks=callbacks, run=run)
    test = EvaluationLoader(DATA, 16, World())
    try:
        loader = run.loader(DATA, 16, lanes=4)
        trainer.train(loader, test, steps=6, evaluate_every=2, checkpoints=CheckpointPolicy(2, keep=9))
        run.finish()
    except Stopped:
        run.close()
    return trainer


def test_callbacks_may_come_and_go(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = [EarlyStopping("loss", "min", 3), SaveBest("loss", "min")]
    train_with(before, tmp_path / "run", 3)
    assert checkpoints(tmp_path / "run").steps() == [3, 2], "and nothing before the first step"
    saved = before[1].state_dict()
    kept, stranger, loaded = SaveBest("loss", "min"), Callback(), []
    kept.load_state_dict = loaded.append  # type: ignore[method-assign]
    train_with([stranger, kept], tmp_path / "run", 4)
    assert loaded == [saved]
    assert caplog.messages == ["the saved state of EarlyStopping is dropped: this trainer has no such callback"]
    caplog.clear()
    train_with([EarlyStopping("loss", "min", 3), SaveBest("loss", "min")], tmp_path / "run")
    assert caplog.messages == ["EarlyStopping is new in this run: it has missed 4 steps"]


class Unsavable:
    def state_dict(self) -> Any:
        return {"queue": object()}

    def load_state_dict(self, state: Any) -> None: ...


def test_what_cannot_be_kept_is_reported_before_the_first_step(tmp_path: Path) -> None:
    script = Script(tmp_path / "run")
    script.run.register_state("queue", Unsavable())
    with pytest.raises(UserError, match=r"register_state\('queue', …\): state_dict\(\)\['queue'\] has the type object"):
        script.train(2)
    assert not script.made
    assert not (tmp_path / "run").exists()
    for name in ("a/b", "x" * 60):
        with pytest.raises(UserError, match=r"run.register_state\(.*cannot name"):
            script.run.register_state(name, Unsavable())
    with pytest.raises(UserError, match=r"something else is registered .*: choose another name"):
        script.run.register_state("queue", Unsavable())


@pytest.mark.parametrize(
    ("now", "message"),
    [
        ({"lr": 0.5}, "optimizer.lr: 0.1 → 0.5"),
        ({"weight_decay": 0.1}, "optimizer.weight_decay: 0 → 0.1"),
        ({"loader": {"shuffle": False}}, "shuffle: True → False"),
    ],
)
def test_other_settings_in_a_script_are_refused(now: dict[str, Any], message: str, tmp_path: Path) -> None:
    """An optimizer's settings are restored from the checkpoint, so new ones would have no effect."""
    Script(tmp_path / "run").train(4, stop_after=2)
    with pytest.raises(UserError, match=r'pass resume="force" to continue .*\n  ' + message + "$"):
        Script(tmp_path / "run", **now).train(4)
    forced = Script(tmp_path / "run", resume="force", **now)
    forced.train(4)
    assert forced.optimizer.param_groups[0]["lr"] == now.get("lr", 0.1)


def test_another_optimizer_starts_afresh_if_forced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Script(tmp_path / "run", momentum=0.9).train(4, stop_after=2)
    Script(tmp_path / "run", optimizer=torch.optim.Adam, resume="force").train(4)
    assert "optimizer was a SGD: its saved state does not fit a Adam" in caplog.text


class Counting(torch.optim.SGD):
    """Has state that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        shared = self.state.setdefault("all", {"calls": 0})
        shared["calls"] += 1
        self.param_groups[0]["lr"] = 0.1 / shared["calls"]
        super().step()


class Shared(nn.Module):
    """Two modules with one buffer, which no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 3), nn.Linear(3, 3)
        table = torch.ones(3)
        self.one.register_buffer("table", table, persistent=False)
        self.two.register_buffer("table", table, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.two(self.one(inputs) * self.one.table) * self.two.table


class Growing(nn.Linear):
    """Its extra state has another size each time."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.seen = torch.zeros(0)

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, torch.ones(1)])
        return super().forward(inputs)

    def get_extra_state(self) -> Tensor:
        return self.seen

    def set_extra_state(self, state: Tensor) -> None:
        self.seen = state


IMAGES = TensorDataset(torch.randn(64, 3, 5, 5, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 3)


def channels_last() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 7, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(7, 3))
    return model.to(memory_format=torch.channels_last)


CASES: dict[str, dict[str, Any]] = {
    "optimizer with a state of its own": {"optimizer": Counting},
    "shared buffers": {"model": Shared},
    "extra state": {"model": Growing},
    "channels last": {"model": channels_last, "data": IMAGES, "optimizer": torch.optim.Adam, "fused": True, "lr": 0.01},
    "adafactor": {"optimizer": torch.optim.Adafactor},
}


@pytest.mark.parametrize("case", CASES)
def test_odd_models_and_optimizers_resume_with_the_same_bits(case: str, tmp_path: Path) -> None:
    whole = Script(None, **CASES[case]).train(6)
    Script(tmp_path / "run", **CASES[case]).train(6, stop_after=2)
    assert Script(tmp_path / "run", **CASES[case]).train(6) == whole
    assert checkpoint_digest(checkpoints(tmp_path / "run").load(6).values) == whole


def train_digits(world: World, folder: Path, stop_after: int | None, *overrides: str, resume: Any = "auto") -> Any:
    torch.set_num_threads(1)
    recipe, config = load_recipe("digits", ["steps=6", "threads=1", *overrides])
    try:
        return train_recipe(recipe, config, world, RunFolder(folder), [], resume=resume, stop_after=stop_after)
    except Stopped:
        return None


@pytest.mark.parametrize("settings", [["batch.per_device=16"], ["batch.per_device=8", "accumulate=2"]])
def test_a_batch_given_per_device_stays_that_of_the_first_start(settings: list[str], tmp_path: Path) -> None:
    whole = ranks(2).run(train_digits, tmp_path / "whole", None, *settings)[0]
    ranks(2).run(train_digits, tmp_path / "run", 3, *settings)
    assert train_digits(World(), tmp_path / "run", None, *settings).digest == whole.digest
    fingerprint = checkpoints(tmp_path / "run").manifest(6).facts["fingerprint"]
    assert fingerprint["global_batch"] == 32
    # Other words for the batch are another batch, if it is forced.
    train_digits(World(), tmp_path / "run", None, "batch.per_device=24", "lanes=4", "steps=8", resume="force")
    assert checkpoints(tmp_path / "run").manifest(8).facts["fingerprint"]["global_batch"] == 24
    assert RunFolder(tmp_path / "run").read_run_json()["fingerprint"]["lanes"] == 4


def test_settings_that_may_change_on_resume_change_no_bit(tmp_path: Path) -> None:
    whole = train_digits(World(), tmp_path / "whole", None)
    train_digits(World(), tmp_path / "run", 3)
    free = ["log_every=1", "trace=true", "checkpoint.every=1", "checkpoint.keep=2", "bucket_mb=0.01", "timeout_s=60"]
    assert train_digits(World(), tmp_path / "run", None, *free).digest == whole.digest
    assert checkpoints(tmp_path / "run").steps() == [6, 5]
    assert "log_every: 1\n" in (tmp_path / "run" / "config.yaml").read_text()
    train_digits(World(), tmp_path / "run", None)
    starts = [event for event in read_jsonl(tmp_path / "run" / "events.jsonl") if event["kind"] == "start"]
    assert [event["is_done"] for event in starts] == [False, False, True]
    assert "log_every: 10\n" in (tmp_path / "run" / "config.yaml").read_text()


FAILING = """
import sys, torch, lockstep
from torch import nn
from torch.utils.data import TensorDataset

run = lockstep.Run(sys.argv[1], sinks=[])
model = run.prepare(nn.Sequential(nn.Linear(4, 1500), nn.Linear(1500, 1500), nn.Linear(1500, 3)))
optimizer = run.optimizer(model, lambda params: torch.optim.Adam(params))
loader = run.loader(TensorDataset(torch.randn(16, 4)), 16, lanes=1)
for step in run.steps(loader, steps=9, save_every=1):
    step.accumulate(lambda model, batch: (model(batch[0]).square().sum(), 16), model)
    step.update(optimizer)
    if step.number == 2:
        raise ValueError("of the script")
"""


@pytest.mark.parametrize("attempt", range(4))  # it is a race
def test_a_script_that_fails_during_a_save_fails_with_its_own_error(attempt: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FAILING)
    ended = run([sys.executable, "script.py", "run"], tmp_path)
    assert ended.code == 1, ended.err
    assert ended.err.endswith("ValueError: of the script\n")
    assert checkpoints(tmp_path / "run").steps() in ([], [1]), "depending on timing"


def end_with_a_save_that_fails(world: World, folder: Path, num_failures: int) -> list[int]:
    """End with a save that is due at the last step and fails this many times on rank 1; rank 0 finds out first."""
    torch.set_num_threads(1)
    run = Run(folder, world, seed=1, sinks=[])
    model = run.prepare(nn.Linear(4, 3))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    write_tensors, failures = async_saver.write_tensors, iter(range(num_failures))

    def write(*arguments: Any) -> StoredFile:
        if world.rank == 1 and next(failures, None) is not None:
            raise OSError(5, "Input/output error")
        return write_tensors(*arguments)

    async_saver.write_tensors = write
    try:
        for step in run.steps(run.loader(DATA, 16, lanes=4), steps=3, checkpoints=CheckpointPolicy(3), finish=False):
            step.accumulate(loss, model)
            step.update(optimizer)
        if world.is_main:
            time.sleep(0.5)
            run._checkpointer.poll()
        run.finish()
    finally:
        async_saver.write_tensors = write_tensors
        run.close()
    return CheckpointStore(folder / "checkpoints").steps()


def test_a_failed_final_save_is_repeated_by_all_ranks(tmp_path: Path) -> None:
    assert ranks(2).run(end_with_a_save_that_fails, tmp_path / "once", 1) == [[3], [3]]
    with pytest.raises(RanksFailed, match="step 3, the run's end, could not be saved") as failed:
        ranks(2).run(end_with_a_save_that_fails, tmp_path / "twice", 2)
    assert "2 of 2 ranks failed" in str(failed.value)


def test_another_processor_is_drift_and_can_be_accepted(tmp_path: Path) -> None:
    """Through the real command: a variable has torch avoid newer instructions, and its sums differ."""
    command = [*LOCKSTEP, "train", "digits", "model.width=4", "steps=4", "batch.global=32", "--quiet"]
    stopped = run([*command, "--stop-after", "2"], tmp_path)
    assert stopped.code == 75, stopped.err
    older = {"ATEN_CPU_CAPABILITY": "default"}
    refused = run(command, tmp_path, older)
    assert refused.code == 4, refused.err
    assert "cpu_capability: " in refused.err
    assert "--accept-drift" in refused.err
    assert run([*command, "--accept-drift"], tmp_path, older).code == 0


@pytest.mark.parametrize("name", sorted(usable_optimizers()))
def test_every_optimizer_that_a_config_may_name_resumes(name: str, tmp_path: Path) -> None:
    kind = find_optimizer(name)

    def script(folder: Path) -> Script:
        return Script(folder, model=lambda: nn.Linear(4, 3, bias=False), optimizer=kind)  # Muon takes matrices only

    undisturbed = script(tmp_path / "a").train(6)
    assert script(tmp_path / "b").train(6, stop_after=3) != undisturbed
    resumed = script(tmp_path / "b")
    assert resumed.train(6) == undisturbed
    assert resumed.made == [4, 5, 6]
