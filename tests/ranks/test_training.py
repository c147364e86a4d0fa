"""Training on several ranks: the global mean's gradient, exact metrics, and only rank 0 writes and prints."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.checkpoint import async_saver
from lockstep.checkpoint.manifest import StoredFile
from lockstep.config.train_schema import BatchConfig, Config
from lockstep.errors import UserError
from lockstep.events.run_folder import RunFolder
from lockstep.recipes.digits import DigitsConfig
from lockstep.recipes.digits.recipe import DigitsRecipe
from lockstep.recipes.registry import load_recipe
from lockstep.testing import RanksFailed, ranks
from lockstep.train.train_job import plan_batch, train_recipe
from lockstep.train.trainer import Trainer
from lockstep.world.world import World
from tests.sinks import RecordingSink


def train_in_a_folder_of_ones_own(world: World, parent: str) -> tuple[list[str], list[str], dict[str, float]]:
    """Train with a separate folder and screen for each rank, to see what each of them writes."""
    recipe, config = load_recipe("digits", ["quick=true", "model.width=4"])
    folder, screen = Path(parent) / f"of-rank-{world.rank}", RecordingSink()
    outcome = train_recipe(recipe, config, world, RunFolder(folder), [screen])
    written = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return written, screen.kinds, outcome.metrics


def test_rank_0_alone_writes_and_prints(tmp_path: Path) -> None:
    first, second = ranks(2).run(train_in_a_folder_of_ones_own, str(tmp_path))
    assert first[0] == [
        ".lock",
        "checkpoints/LATEST",
        "checkpoints/step-8/manifest.json",
        "checkpoints/step-8/model.safetensors",
        "checkpoints/step-8/optimizer.safetensors",
        "config.yaml",
        "events.jsonl",
        "history.json",
        "ledger.jsonl",
        "ranks/0.jsonl",
        "run.json",
    ]
    assert second[0] == ["ranks/1.jsonl"]
    assert first[1] == ["start", "step", "eval", "checkpoint", "end"]
    assert second[1] == []
    assert first[2] == second[2], "every rank knows the metrics"


def train_without_ddp(world: World, folder: str) -> None:
    recipe, config = load_recipe("digits", ["quick=true", "use_ddp=no"])
    train_recipe(recipe, config, world, RunFolder(Path(folder)), [])


def test_use_ddp_false_is_for_one_process(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"parallel=dp \(or use_ddp=false\) is for one process, but 2 were started"):
        ranks(2).run(train_without_ddp, str(tmp_path / "a"))
    train_without_ddp(World(), str(tmp_path / "b"))


def refuse_together(world: World, folder: str) -> None:
    recipe, config = load_recipe("digits", ["quick=true"])
    train_recipe(recipe, config, world, RunFolder(Path(folder)), [])


def test_all_ranks_learn_that_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("of another program")
    with pytest.raises(RanksFailed, match="2 of 2 ranks failed") as caught:
        ranks(2).run(refuse_together, str(tmp_path))
    assert str(caught.value).count("UserError: " + str(tmp_path)) == 2


@pytest.mark.parametrize(
    ("batch", "more", "expected"),
    [
        ({"global_batch": 64}, {}, (64, "auto")),
        ({"global_batch": 64}, {"lanes": 16}, (64, 16)),
        ({"per_device": 32}, {}, (128, "auto")),
        ({"per_device": 32}, {"accumulate": 2}, (256, 8)),
    ],
)
def test_the_effective_batch(batch: dict[str, int], more: dict[str, Any], expected: tuple[int, int | str]) -> None:
    config = Config(recipe="digits", epochs=1, batch=BatchConfig(**batch), **more)  # type: ignore[arg-type]
    assert plan_batch(config, World(size=4)) == expected


class Draws(DigitsRecipe):
    """Records what is drawn for the weights, and what the first loss draws."""

    def model(self, config: DigitsConfig) -> nn.Module:
        self.for_weights = torch.rand(1).item()
        self.for_loss: list[float] = []
        return super().model(config)

    def loss(self, model: nn.Module, batch: object) -> tuple[torch.Tensor, int]:
        self.for_loss.append(torch.rand(1).item())
        return super().loss(model, batch)


def draw(world: World, folder: str, seed: int) -> tuple[float, float]:
    _, config = load_recipe("digits", ["quick=true", f"seed={seed}"])
    recipe = Draws(config)
    train_recipe(recipe, config, world, RunFolder(Path(folder)), [])
    return recipe.for_weights, recipe.for_loss[0]


def test_ranks_start_equal_draw_different_numbers_and_repeat_with_the_same_seed(tmp_path: Path) -> None:
    folders = (("a", 0), ("b", 0), ("c", 1))
    first, again, other = (ranks(2).run(draw, str(tmp_path / name), seed) for name, seed in folders)
    assert first == again
    assert first != other
    (weights_0, loss_0), (weights_1, loss_1) = first
    assert weights_0 == weights_1
    assert loss_0 != loss_1


def finish_after_a_slow_save(world: World, folder: str) -> bool:
    write_tensors = async_saver.write_tensors

    def slowly(*arguments: Any) -> StoredFile:
        time.sleep(0.3)
        return write_tensors(*arguments)

    async_saver.write_tensors = slowly
    try:
        recipe, config = load_recipe("digits", ["quick=true"])
        train_recipe(recipe, config, world, RunFolder(Path(folder)), [])
    finally:
        async_saver.write_tensors = write_tensors
    return (Path(folder) / "checkpoints" / "LATEST").exists()


def test_no_rank_finishes_before_the_result_is_saved(tmp_path: Path) -> None:
    assert ranks(2).run(finish_after_a_slow_save, str(tmp_path / "a")) == [True, True]


def make_a_trainer_without_a_world(world: World) -> int:
    model = nn.Linear(1, 1)
    return Trainer(model, torch.optim.SGD(model.parameters()), lambda m, b: (m(b).sum(), 1), device="cpu").world.size


def test_a_trainer_made_without_a_world_uses_the_current_one() -> None:
    assert ranks(2).run(make_a_trainer_without_a_world) == [2, 2]


def test_a_best_model_at_the_last_step_is_saved_once(tmp_path: Path) -> None:
    screen = RecordingSink()
    overrides = ["quick=true", "model.width=4", "steps=5", "best.metric=accuracy", "best.mode=max"]
    recipe, config = load_recipe("digits", overrides)
    outcome = train_recipe(recipe, config, World(), RunFolder(tmp_path / "run"), [screen])
    assert screen.kinds == ["start", "step", "eval", "checkpoint", "end"]
    assert outcome.step == 5, "a smoke run is not longer than the run"


def test_an_accumulation_that_is_no_power_of_two_is_named_in_the_error() -> None:
    config = Config(recipe="digits", steps=1, batch=BatchConfig(per_device=8), accumulate=3)
    with pytest.raises(UserError, match="accumulate=3 on 1 process makes 3 lanes"):
        plan_batch(config, World())
