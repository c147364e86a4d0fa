"""The recipe: its problem, its settings, its pictures."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from lockstep.errors import UserError
from lockstep.recipes.wing import WingConfig, WingModel, WingWeights, wing_pictures
from lockstep.recipes.wing.fitness import Assessor
from lockstep.recipes.wing.recipe import WingRecipe
from lockstep.recipes.wing.wing_pictures import draw_front, draw_history, draw_pictures, front_rows
from lockstep.search.design_archive import DesignArchive
from lockstep.search.problem import Problem
from lockstep.world.keyed_random import keyed_generator
from tests.unit.recipes.wing.wings import design


def values_of(problem: Problem, designs: torch.Tensor) -> torch.Tensor:
    found = problem.evaluator.evaluate(problem.genome, designs, range(len(designs)))
    return torch.tensor([each.values for each in found], dtype=torch.float64)


def test_one_objective_or_three() -> None:
    single, pareto = (
        WingRecipe().problem(WingConfig(wing=WingModel(objectives=which, panels=16))) for which in ("single", "pareto")
    )
    assert [each.name for each in single.objectives] == ["fitness"]
    assert [each.name for each in pareto.objectives] == ["downforce", "drag", "deflection"]
    base = single.genome.row(WingRecipe().base(WingConfig())).unsqueeze(0)
    assert values_of(single, base).shape == (1, 1)
    assert values_of(pareto, base)[0, 0] > 1000  # newtons


def test_settings_reach_the_fitness() -> None:
    base = design()
    plain, fast, dear = (
        values_of(WingRecipe().problem(WingConfig(wing=settings)), base).item()
        for settings in (
            WingModel(panels=16),
            WingModel(panels=16, speed=80.0),
            WingModel(panels=16, weights=WingWeights(drag=9.0)),
        )
    )
    assert dear < plain != fast


@pytest.mark.parametrize("panels", [15, 14, 41, 402, 10**6])
def test_panels_must_be_even_enough_and_not_too_many(panels: int) -> None:
    with pytest.raises(ValidationError, match="expected an even number from 16 to 400"):
        WingModel(panels=panels)


@pytest.mark.parametrize("objectives", ["single", "pareto"])
def test_an_archive_gives_three_pictures(objectives: str, tmp_path: Path) -> None:
    config = WingConfig(wing=WingModel.model_validate({"objectives": objectives, "panels": 16}))
    problem = WingRecipe().problem(config)
    archive = DesignArchive(problem.genome, len(problem.objectives))
    for generation in range(2):
        designs = problem.genome.sample(30, keyed_generator(generation, "designs"))
        costs = (values_of(problem, designs) * problem.signs).nan_to_num(torch.inf)
        archive.add(designs, costs, generation, {})
    draw_pictures(tmp_path / "pictures", archive, Assessor(num_panels=16))
    for name in ("best-wing", "fitness", "front"):
        assert (tmp_path / "pictures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_search_without_a_wing_has_nothing_to_draw(tmp_path: Path) -> None:
    archive = DesignArchive(Assessor().genome, 1)
    archive.add(design(), torch.full((1, 1), torch.inf, dtype=torch.float64), 0, {0: "it broke"})
    draw_pictures(tmp_path, archive, Assessor())
    assert not list(tmp_path.iterdir())


def test_a_front_is_of_legal_designs_with_more_for_less() -> None:
    downforce = torch.tensor([5.0, 4.0, 3.0, 9.0, 1.0])
    drag = torch.tensor([3.0, 3.5, 2.0, 1.0, 2.5])
    is_legal = torch.tensor([True, True, True, False, True])
    assert front_rows(downforce, drag, is_legal).tolist() == [2, 0]


def test_designs_that_break_rules_are_drawn_as_such(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[torch.Tensor] = []
    monkeypatch.setattr(wing_pictures, "draw_front", lambda *given: drawn.append(given[2]))
    archive = DesignArchive(Assessor().genome, 1)
    archive.add(torch.cat([design(), design(span=2.1)]), torch.tensor([[1.0], [2.0]], dtype=torch.float64), 0, {})
    draw_pictures(tmp_path, archive, Assessor(num_panels=16))
    assert drawn[0][:2].tolist() == [True, False]


def test_a_front_can_be_drawn_without_a_legal_design(tmp_path: Path) -> None:
    draw_front(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), torch.tensor([False, False]), tmp_path / "a.png")
    assert (tmp_path / "a.png").exists()


def test_a_history_skips_failures(tmp_path: Path) -> None:
    nan = float("nan")
    draw_history(torch.tensor([0, 0, 1, 2]), torch.tensor([1.0, nan, nan, 2.0]), tmp_path / "a.png")
    assert (tmp_path / "a.png").exists()


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wing_pictures, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install 'lockstep-train\[wing\]', or wing.pictures=no"):
        WingRecipe().problem(WingConfig())
    assert WingRecipe().problem(WingConfig(wing=WingModel(pictures=False)))
