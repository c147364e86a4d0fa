"""The ebm recipe's loss, its curriculum and its metrics."""

from math import nan
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import ConfigError, UserError
from lockstep.metrics.aggregator import MetricAggregator
from lockstep.recipes.ebm.attack import GradientAscent
from lockstep.recipes.ebm.energy_network import Classifier
from lockstep.recipes.ebm.objective import (
    CRITERION,
    PLAIN_WEIGHTS,
    Attacks,
    Curriculum,
    EvaluationAttacks,
    LossWeights,
    TermSums,
    loss_terms,
    robustness_metrics,
)
from lockstep.recipes.registry import load_recipe

ATTACKS = Attacks(GradientAscent(0.5, 0.2, 2), GradientAscent(1.0, 0.2, 2))


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


def some_batch(count: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    images, outsiders = (torch.rand(count, 1, 8, 8, generator=draw) for _ in range(2))
    return images, torch.arange(count) % 3, outsiders


def total(terms: TermSums) -> Tensor:
    return torch.stack([value for value, _ in terms.values()]).sum()


def test_plain_is_cross_entropy_and_draws_nothing() -> None:
    model, batch = linear(), some_batch()
    before = torch.get_rng_state()
    terms = loss_terms(model, batch, PLAIN_WEIGHTS, ATTACKS)
    assert list(terms) == ["cross_entropy"]
    assert terms["cross_entropy"][1] == 4
    torch.testing.assert_close(terms["cross_entropy"][0], F.cross_entropy(model(batch[0]), batch[1], reduction="sum"))
    assert torch.equal(before, torch.get_rng_state())


def test_an_attack_adds_the_loss_at_worse_images() -> None:
    model, batch = linear(), some_batch()
    plain, attacked = (
        loss_terms(model, batch, weights, ATTACKS)["cross_entropy"][0]
        for weights in (PLAIN_WEIGHTS, LossWeights(0.5, 0, 0))
    )
    assert attacked > 1.5 * plain


def test_r1_is_half_the_squared_slope_and_reaches_the_parameters() -> None:
    model, batch = linear(), some_batch()
    value, _ = loss_terms(model, batch, LossWeights(0, 0, 3.0), ATTACKS)["r1"]
    slopes = model(batch[0]).softmax(1) @ model[1].weight  # of logsumexp(W x + b)
    torch.testing.assert_close(value, 1.5 * slopes.square().sum())
    value.backward()
    assert model[1].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("parallel", ["fsdp", "{shard: 2}"])
def test_r1_is_refused_if_the_model_is_sharded(parallel: str) -> None:
    ebm, config = load_recipe("ebm", [f"parallel={parallel}", "determinism=fast"])
    with pytest.raises(
        UserError, match=r"weights.r1=0.1 needs second derivatives.*: set weights.r1=0, or parallel=zero"
    ):
        ebm(config)  # type: ignore[operator]
    for without in ("weights.r1=0", "mode=plain"):
        _, config = load_recipe("ebm", [f"parallel={parallel}", "determinism=fast", without])
        ebm(config)  # type: ignore[operator]


def test_the_energy_term_lifts_the_data_above_disguised_outsiders() -> None:
    model, batch = linear(), some_batch()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    values = []
    for _ in range(30):
        optimizer.zero_grad()
        value, _ = loss_terms(model, batch, LossWeights(0, 1.0, 0), ATTACKS)["energy"]
        value.backward()
        optimizer.step()
        values.append(value.item())
    assert values[-1] < 0.8 * values[0]
    inside, outside = (model(images).logsumexp(1).mean() for images in (batch[0], batch[2]))
    assert inside > outside


def test_terms_are_sums_over_images() -> None:
    torch.manual_seed(0)
    model, batch = Classifier(1, 8, 3, 4, 1), some_batch()
    weights = LossWeights(0, 1.0, 0.5)  # without the attack that draws
    parts = [loss_terms(model, tuple(x[i : i + 1] for x in batch), weights, ATTACKS) for i in range(4)]  # type: ignore[arg-type]
    torch.testing.assert_close(
        total(loss_terms(model, batch, weights, ATTACKS)), torch.stack([*map(total, parts)]).sum()
    )


class Log:
    """The part of a trainer's run that a curriculum logs to."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []
        self.run = SimpleNamespace(log=lambda **values: self.said.append(values))


def test_the_curriculum_grows_when_the_goal_is_met_up_to_its_end_and_resumes() -> None:
    trainer: Any = Log()
    curriculum = Curriculum(first=2, last=4, goal=0.9)
    seen = []
    for value in (0.5, 0.9, nan, 0.95):
        curriculum.on_evaluate(trainer, {CRITERION: value})
        seen.append(curriculum.steps)
    assert seen == [2, 3, 3, 4]
    assert trainer.said == [{"disguise_steps": 3}, {"disguise_steps": 4}]
    resumed = Curriculum(first=2, last=4, goal=0.9)
    resumed.load_state_dict(curriculum.state_dict())
    resumed.on_evaluate(trainer, {CRITERION: 1.0})
    assert resumed.steps == 4


def test_a_curriculum_that_ends_before_it_begins_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"curriculum.last: expected first=5 or more"):
        load_recipe("ebm", ["curriculum.first=5", "curriculum.last=4"])


class Brightness(nn.Module):
    """Tells dark images from bright ones, and classes by their first pixel."""

    def forward(self, images: Tensor) -> Tensor:
        is_second = images[:, 0, 0, :1] > 0.25
        return torch.cat([~is_second, is_second], 1) * 4.0 - 20 * images.mean((1, 2, 3))[:, None]


def test_the_metrics_of_a_classifier_of_bright_and_dark_images() -> None:
    images = torch.zeros(6, 1, 8, 8)
    images[3:, 0, 0, 0] = 0.5
    labels = torch.tensor([0, 0, 0, 1, 1, 0])
    unseen = torch.stack([torch.full((6, 1, 8, 8), 0.9), torch.zeros(6, 1, 8, 8)], 1)  # bright, and like the data
    aggregator = MetricAggregator(torch.device("cpu"))
    weak = GradientAscent(radius=1e-3, rate=1e-3, steps=1)
    with torch.no_grad():
        for number, part in enumerate((slice(0, 4), slice(4, 6))):
            batch = [x[part] for x in (images, labels, unseen[:, 0], unseen)]
            aggregator.add(
                number, robustness_metrics(Brightness(), batch, ("bright", "dark"), EvaluationAttacks(weak, weak, weak))
            )
    results = aggregator.results()
    assert next(iter(results)) == "accuracy"
    assert results["accuracy"] == results["robust_accuracy"] == pytest.approx(5 / 6)
    assert (results["auroc/bright"], results[CRITERION]) == (1, 1)
    assert results["auroc/dark"] < 0.5
    assert results["auroc"] == pytest.approx((results["auroc/bright"] + results["auroc/dark"]) / 2)
    # The scores of an image are 4 and 0, less 20 times its brightness.
    dark, bright = 0.0, 0.9
    base = torch.tensor([4.0, 0.0]).logsumexp(0).item()
    assert results["energy_unseen"] == pytest.approx(20 * (bright + dark) / 2 - base)
    assert results["energy"] == pytest.approx(20 * 0.5 / 64 / 2 - base)  # half of the images have one gray pixel
