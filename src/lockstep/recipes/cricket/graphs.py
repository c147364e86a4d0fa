"""Innings as graphs for torch-geometric.

Nodes are balls, with the state before each, and players, with their careers before the match. Edges lead from batter,
non-striker and bowler to each of their balls, and from the preceding balls to each ball. The result of a ball is sent
only along edges to later balls, and no edge leads to a player. So nothing that a ball receives, over any number of
layers, depends on its own outcome or on a later one.

torch-geometric is imported here and nowhere else: it is optional, slow to import, and warns about its own internals.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.errors import UserError
from lockstep.recipes.cricket.league import ROLES, InningsRecord

with warnings.catch_warnings():
    # torch-geometric uses torch.jit.script, which is deprecated in newer versions of torch.
    warnings.filterwarnings("ignore", message=r".*torch\.jit\.script.*", category=DeprecationWarning)
    try:
        from torch_geometric.data import Batch, HeteroData
        from torch_geometric.nn import MessagePassing, SAGEConv
        from torch_geometric.utils import softmax
    except ImportError:
        raise UserError("the cricket recipe needs torch-geometric: pip install 'lockstep-train[cricket]'") from None

__all__ = ["Batch", "HeteroData", "MessagePassing", "SAGEConv", "softmax"]


NUM_BONDS = 4  # how two balls are related: same batter or not, same bowler or not


class InningsGraphs(Dataset[HeteroData]):
    """One graph per innings."""

    def __init__(self, records: Sequence[InningsRecord], memory: int) -> None:
        self.records = records
        self._memory = memory  # earlier balls that each ball attends to

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> HeteroData:
        return innings_graph(self.records[index], self._memory)


def innings_graph(record: InningsRecord, memory: int) -> HeteroData:
    """Build the graph of an innings; each ball attends to the `memory` balls before it."""
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
    """Pair each ball with each of the `memory` balls before it; return the earlier and the later balls."""
    later = torch.arange(num_balls)[:, None].expand(-1, memory)
    earlier = later - torch.arange(1, memory + 1)
    is_there = earlier >= 0
    return earlier[is_there], later[is_there]


def collate_graphs(graphs: list[HeteroData]) -> Batch:
    """Combine graphs into one batch."""
    return Batch.from_data_list(graphs)
