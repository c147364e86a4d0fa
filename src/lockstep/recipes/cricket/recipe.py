"""The cricket recipe: `lockstep train cricket`, or `lockstep train cricket data.path=t20s_json.zip epochs=5`."""

from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.data.evaluation_loader import EvaluationLoader
from lockstep.errors import UserError
from lockstep.metrics.aggregator import MetricValue
from lockstep.recipes.cricket import CricketConfig
from lockstep.recipes.cricket.calibration import CalibrationError, LossByOutcome, Reliability, draw_calibration
from lockstep.recipes.cricket.cricsheet import read_matches
from lockstep.recipes.cricket.league import League, make_league
from lockstep.recipes.cricket.match import NUM_OUTCOMES
from lockstep.recipes.cricket.synthetic import synthetic_matches
from lockstep.train.recipe import Splits
from lockstep.train.run import Run


class CricketRecipe:
    """Predicts the outcome of the next ball. A sample is an innings; losses and metrics count balls."""

    config_class = CricketConfig

    def __init__(self, config: CricketConfig) -> None:
        self._config = config

    @cached_property
    def league(self) -> League:
        data = self._config.data
        if data.picture and find_spec("matplotlib") is None:
            raise UserError(
                "the calibration's picture needs matplotlib: pip install 'lockstep-train[cricket]', or data.picture=no"
            )
        matches = synthetic_matches(data.matches) if data.path is None else read_matches(data.path)
        return make_league(matches, data.split, data.test_share, data.evaluate_on)

    @cached_property
    def class_weights(self) -> Tensor:
        """Weights of the outcomes, with a mean of 1 over the balls of the training set."""
        power = {"none": 0.0, "sqrt": -0.5, "balanced": -1.0}[self._config.model.class_weights]
        base = torch.from_numpy(self.league.table.base)
        weights = base**power
        return (weights / (weights * base).sum()).float()

    def model(self, config: CricketConfig) -> nn.Module:
        from lockstep.recipes.cricket.cricket_network import CricketEnsemble, CricketNet, Sizes

        settings = config.model
        sizes = Sizes(
            num_players=self.league.num_players,
            memory=config.data.memory,
            width=settings.width,
            identity_width=settings.identity_width,
            depth=settings.depth,
            heads=settings.heads,
        )
        log_table = torch.from_numpy(self.league.table.probabilities).log().float()
        return CricketEnsemble(
            [
                CricketNet(log_table.clone(), sizes, settings.dropout, settings.identity_dropout)
                for _ in range(settings.members)
            ]
        )

    def data(self, config: CricketConfig) -> Splits:
        from lockstep.recipes.cricket.graphs import InningsGraphs, collate_graphs

        train, test = (InningsGraphs(part, config.data.memory) for part in (self.league.train, self.league.test))
        return Splits(train, test, collate_graphs)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        scores, outcomes = model(batch), batch["ball"].y
        weights = None
        if self._config.model.class_weights != "none":
            weights = self.class_weights.to(outcomes.device)
        members = len(scores) // len(outcomes)  # each member learns from all balls
        total = F.cross_entropy(scores, outcomes.repeat(members), weight=weights, reduction="sum")
        return total / members, len(outcomes)

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, MetricValue]:
        scores, outcomes = model(batch), batch["ball"].y
        losses, table_losses, base_losses = (
            F.cross_entropy(each, outcomes, reduction="none").double()
            for each in (scores, self._table_scores(batch), self._base_scores(batch))
        )
        count = len(outcomes)
        return {
            "log_loss": (losses.sum(), count),
            "accuracy": ((scores.argmax(1) == outcomes).sum(), count),
            "log_loss_table": (table_losses.sum(), count),
            "log_loss_base": (base_losses.sum(), count),
            "improvement": ((table_losses - losses).sum(), table_losses.sum()),  # relative to the table model
            "calibration_error": CalibrationError(scores.softmax(1), outcomes),
            "log_loss_by_outcome": LossByOutcome(losses, outcomes),
        }

    def conclude(self, run: Run, model: nn.Module, config: CricketConfig) -> None:
        """Draw predicted probabilities against observed frequencies, for the network and the baselines."""
        if not config.data.picture:
            return
        splits = self.data(config)
        loader = EvaluationLoader(splits.test, config.evaluation_batch, run.world, collate=splits.collate)
        found = run.evaluate(model, loader, self._reliabilities)
        if run.world.is_main:
            run.log_image("reliability", draw_calibration(list(found.items())))

    def _reliabilities(self, model: nn.Module, batch: Any) -> Mapping[str, MetricValue]:
        outcomes = batch["ball"].y
        scores = {"network": model(batch), "table": self._table_scores(batch), "base rate": self._base_scores(batch)}
        return {name: Reliability(each.softmax(1), outcomes) for name, each in scores.items()}

    def _table_scores(self, batch: Any) -> Tensor:
        """The table model's log-probabilities for each ball."""
        cells = batch["ball"].cell
        return torch.from_numpy(self.league.table.probabilities).log().float().to(cells.device)[cells]

    def _base_scores(self, batch: Any) -> Tensor:
        """The log of the base rates, for each ball."""
        outcomes = batch["ball"].y
        base = torch.from_numpy(self.league.table.base).log().float().to(outcomes.device)
        return base.expand(len(outcomes), NUM_OUTCOMES)


recipe = CricketRecipe
