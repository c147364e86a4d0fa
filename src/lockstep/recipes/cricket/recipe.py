"""Run it: `lockstep train cricket`, or `lockstep train cricket data.path=t20s_json.zip epochs=5 batch.global=32`."""

from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from lockstep.config.fields import Count, Flag, Frozen
from lockstep.config.schema import Config
from lockstep.data.evaluation import EvaluationLoader
from lockstep.errors import UserError
from lockstep.metrics.tally import Part
from lockstep.recipes.cricket.calibration import CalibrationError, LossByOutcome, Reliability, picture
from lockstep.recipes.cricket.cricsheet import read_matches
from lockstep.recipes.cricket.league import League, make_league
from lockstep.recipes.cricket.match import NUM_OUTCOMES
from lockstep.recipes.cricket.synthetic import synthetic_matches
from lockstep.recipes.heads import Heads
from lockstep.train.recipe import Splits
from lockstep.train.run import Run

Share = Annotated[float, Field(ge=0, lt=1, strict=True, allow_inf_nan=False)]


class CricketModel(Frozen):
    width: Count = 64
    depth: Count = 2  # blocks of message passing
    heads: Heads = 4
    members: Count = 1  # networks that learn apart and are averaged; as many times slower
    identity_width: Count = 16  # of what is learned of each player
    dropout: Share = 0.15
    identity_dropout: Share = 0.8  # players of a batch that are taken for strangers
    class_weights: Literal["none", "sqrt", "balanced"] = "none"  # others spoil the calibration


class CricketData(Frozen):
    path: str | None = None  # Cricsheet's JSON: a zip, a folder or a file; synthetic matches if there is none
    matches: Count = 300  # synthetic ones
    split: Literal["match", "date"] = "date"  # the test: the latest matches, or some by a hash of their name
    test_share: Annotated[float, Field(gt=0, lt=1, strict=True, allow_inf_nan=False)] = 0.2
    evaluate_on: Literal["test", "validation"] = "test"  # validation: held out of the training matches, to tune on
    memory: Count = 8  # balls that each ball looks back at
    picture: Flag = True  # of the calibration at the end, with matplotlib


class CricketConfig(Config):
    model: CricketModel = CricketModel()
    data: CricketData = CricketData()


class Cricket:
    """Chances of the next ball. One sample is an innings; losses and metrics are counted by ball."""

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
        """With a mean of 1 over the training's balls."""
        power = {"none": 0.0, "sqrt": -0.5, "balanced": -1.0}[self._config.model.class_weights]
        base = torch.from_numpy(self.league.table.base)
        weights = base**power
        return (weights / (weights * base).sum()).float()

    def model(self, config: CricketConfig) -> nn.Module:
        from lockstep.recipes.cricket.network import CricketNet, Panel, Sizes

        settings = config.model
        sizes = Sizes(
            num_players=self.league.num_players,
            memory=config.data.memory,
            width=settings.width,
            identity_width=settings.identity_width,
            depth=settings.depth,
            heads=settings.heads,
        )
        log_table = torch.from_numpy(self.league.table.chances).log().float()
        return Panel(
            [
                CricketNet(log_table.clone(), sizes, settings.dropout, settings.identity_dropout)
                for _ in range(settings.members)
            ]
        )

    def data(self, config: CricketConfig) -> Splits:
        from lockstep.recipes.cricket.graphs import InningsGraphs, collate

        train, test = (InningsGraphs(part, config.data.memory) for part in (self.league.train, self.league.test))
        return Splits(train, test, collate)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        scores, outcomes = model(batch), batch["ball"].y
        weights = None
        if self._config.model.class_weights != "none":
            weights = self.class_weights.to(outcomes.device)
        members = len(scores) // len(outcomes)  # each learns from all balls
        total = F.cross_entropy(scores, outcomes.repeat(members), weight=weights, reduction="sum")
        return total / members, len(outcomes)

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Part]:
        scores, outcomes = model(batch), batch["ball"].y
        losses, table_losses, base_losses = (
            F.cross_entropy(each, outcomes, reduction="none").double()
            for each in (scores, self._table(batch), self._base(batch))
        )
        count = len(outcomes)
        return {
            "log_loss": (losses.sum(), count),
            "accuracy": ((scores.argmax(1) == outcomes).sum(), count),
            "log_loss_table": (table_losses.sum(), count),
            "log_loss_base": (base_losses.sum(), count),
            "improvement": ((table_losses - losses).sum(), table_losses.sum()),  # over the table, as a share
            "calibration_error": CalibrationError(scores.softmax(1), outcomes),
            "log_loss_by_outcome": LossByOutcome(losses, outcomes),
        }

    def conclude(self, run: Run, model: nn.Module, config: CricketConfig) -> None:
        """Show how chances and frequencies agree, for the network and for the models to beat."""
        if not config.data.picture:
            return
        splits = self.data(config)
        loader = EvaluationLoader(splits.test, config.evaluation_batch, run.world, collate=splits.collate)
        found = run.evaluate(model, loader, self._reliabilities)
        if run.world.is_main:
            run.log_image("reliability", picture(list(found.items())))

    def _reliabilities(self, model: nn.Module, batch: Any) -> Mapping[str, Part]:
        outcomes = batch["ball"].y
        scores = {"network": model(batch), "table": self._table(batch), "base rate": self._base(batch)}
        return {name: Reliability(each.softmax(1), outcomes) for name, each in scores.items()}

    def _table(self, batch: Any) -> Tensor:
        """The table model's log-chances of each ball."""
        cells = batch["ball"].cell
        return torch.from_numpy(self.league.table.chances).log().float().to(cells.device)[cells]

    def _base(self, batch: Any) -> Tensor:
        outcomes = batch["ball"].y
        base = torch.from_numpy(self.league.table.base).log().float().to(outcomes.device)
        return base.expand(len(outcomes), NUM_OUTCOMES)


recipe = Cricket
