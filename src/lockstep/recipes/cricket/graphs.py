"""Innings as graphs.

Nodes are the balls, with the state before each, and the players, with their careers before the match. Edges lead from
batter, non-striker and bowler to each ball they had a part in, and from the balls just before to each ball. What came
of a ball (`result`) is told along the edges to later balls only; no edge leads to a player. So nothing that a ball
receives, however many layers pass it on, is of its own outcome or of a later one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.recipes.cricket.geometric import Batch, HeteroData
from lockstep.recipes.cricket.records import ROLES, InningsRecord

NUM_BONDS = 4  # of two balls: with the same batter or not, and the same bowler or not


class InningsGraphs(Dataset[HeteroData]):
    """One graph an innings."""

    def __init__(self, records: Sequence[InningsRecord], memory: int) -> None:
        self.records = records
        self._memory = memory  # balls that each ball looks back at

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> HeteroData:
        return graph(self.records[index], self._memory)


def graph(record: InningsRecord, memory: int) -> HeteroData:
    made: Any = HeteroData()
    made["ball"].x = record.numbers
    made["ball"].over = record.overs
    made["ball"].cell = record.cells
    made["ball"].result = record.results
    made["ball"].y = record.outcomes
    made["player"].x = record.figures
    made["player"].identity = record.identities
    made["innings"].x = record.setting
    balls = torch.arange(len(record.outcomes))
    made["innings", "holds", "ball"].edge_index = torch.stack([torch.zeros_like(balls), balls])
    for role, players in zip(ROLES, record.players, strict=True):
        made["player", role, "ball"].edge_index = torch.stack([players, balls])
    earlier, later = recent_pairs(len(balls), memory)
    batter, _, bowler = record.players
    made["ball", "before", "ball"].edge_index = torch.stack([earlier, later])
    made["ball", "before", "ball"].lag = later - earlier - 1
    made["ball", "before", "ball"].bond = 2 * (batter[earlier] == batter[later]) + (bowler[earlier] == bowler[later])
    return made


def recent_pairs(num_balls: int, memory: int) -> tuple[Tensor, Tensor]:
    """Each ball with each of the `memory` balls before it: the earlier ones, and the later ones."""
    later = torch.arange(num_balls)[:, None].expand(-1, memory)
    earlier = later - torch.arange(1, memory + 1)
    is_there = earlier >= 0
    return earlier[is_there], later[is_there]


def collate(graphs: list[HeteroData]) -> Batch:
    return Batch.from_data_list(graphs)
