"""The graph network: from the graph of an innings to the logits of each ball's outcome."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lockstep.recipes.cricket.careers import NUM_PLAYER_FIGURES, NUM_SETTING_FIGURES
from lockstep.recipes.cricket.graphs import NUM_BONDS, Batch, MessagePassing, SAGEConv, softmax
from lockstep.recipes.cricket.innings_state import MAX_OVERS
from lockstep.recipes.cricket.league import NUM_INPUTS, NUM_RESULTS, ROLES
from lockstep.recipes.cricket.match import NUM_OUTCOMES

_INIT_STD = 0.02  # of embeddings


class Sizes(NamedTuple):
    """The sizes of a network."""

    num_players: int  # with an identity
    memory: int  # earlier balls that each ball attends to
    width: int
    identity_width: int
    depth: int
    heads: int


class CricketNet(nn.Module):
    """Learns corrections to the table model: the last layer starts at zero.

    Players enter by their careers and by an identity: a learned embedding, which stays small for those with few balls
    and is hidden for some players of each batch, so that the network also works without.
    """

    table: Tensor

    def __init__(self, log_table: Tensor, sizes: Sizes, dropout: float, identity_dropout: float) -> None:
        super().__init__()
        width, identity_width = sizes.width, sizes.identity_width
        self.register_buffer("table", log_table)
        self._identity_dropout = identity_dropout
        self.state = nn.Sequential(nn.Linear(NUM_INPUTS, width), nn.GELU(), nn.Linear(width, width))
        self.over = nn.Embedding(MAX_OVERS, width)
        self.career = nn.Sequential(nn.Linear(NUM_PLAYER_FIGURES, width), nn.GELU())
        self.identity = nn.Embedding(1 + sizes.num_players, identity_width, padding_idx=0)  # 0: unknown
        self.roles = nn.ModuleDict(
            {role: SAGEConv(width + identity_width, width, aggr="sum", root_weight=False) for role in ROLES}
        )
        self.of_innings = SAGEConv(NUM_SETTING_FIGURES, width, aggr="sum", root_weight=False)
        self.blocks = nn.ModuleList(InningsBlock(width, sizes.heads, sizes.memory, dropout) for _ in range(sizes.depth))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, NUM_OUTCOMES)
        nn.init.normal_(self.over.weight, std=_INIT_STD)
        nn.init.normal_(self.identity.weight, std=_INIT_STD)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, batch: Batch) -> Tensor:
        """Return logits of shape (balls, outcomes)."""
        ball, edges = batch["ball"], batch.edge_index_dict
        hidden = self.state(ball.x) + self.over(ball.over)
        nobody = hidden.new_zeros(len(hidden), 0)
        hidden = hidden + self.of_innings((batch["innings"].x, nobody), edges["innings", "holds", "ball"])
        players = self._players(batch["player"].x, batch["player"].identity)
        for role, conv in self.roles.items():
            hidden = hidden + conv((players, nobody), edges["player", role, "ball"])
        before = batch["ball", "before", "ball"]
        for block in self.blocks:
            hidden = block(hidden, before.edge_index, ball.result, before.lag, before.bond)
        scores: Tensor = self.output(self.norm(hidden))
        return self.table[ball.cell] + scores.float()

    def _players(self, figures: Tensor, identity: Tensor) -> Tensor:
        if self.training and self._identity_dropout:
            identity = identity * (torch.rand_like(identity, dtype=torch.float32) >= self._identity_dropout)
        return torch.cat([self.career(figures), self.identity(identity)], dim=1)


class CricketEnsemble(nn.Module):
    """An ensemble of independently trained networks, whose probabilities are averaged."""

    def __init__(self, members: Sequence[CricketNet]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, batch: Batch) -> Tensor:
        """Return the mean's log-probabilities, (balls, outcomes); in training, the members' logits, concatenated."""
        scores = [member(batch) for member in self.members]
        if self.training:
            return torch.cat(scores)
        return torch.stack([each.log_softmax(1) for each in scores]).logsumexp(0)


class InningsBlock(nn.Module):
    """Attention to earlier balls, then an MLP per ball."""

    def __init__(self, width: int, heads: int, memory: int, dropout: float) -> None:
        super().__init__()
        self.recent_norm = nn.LayerNorm(width)
        self.recent = RecentBalls(width, heads, memory)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, edges: Tensor, result: Tensor, lag: Tensor, bond: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.recent(self.recent_norm(hidden), edges, result, lag, bond))
        added: Tensor = self.dropout(self.mlp(self.mlp_norm(hidden)))
        return hidden + added


class RecentBalls(MessagePassing):  # type: ignore[misc]  # torch-geometric has no types
    """Attention along the edges from earlier balls, which send their states and results."""

    def __init__(self, width: int, heads: int, memory: int) -> None:
        super().__init__(aggr="add", node_dim=0)
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.result_key = nn.Embedding(NUM_RESULTS, width)
        self.result_value = nn.Embedding(NUM_RESULTS, width)
        self.lag = nn.Embedding(memory, heads)
        self.bond = nn.Embedding(NUM_BONDS, heads)
        self.output = nn.Linear(width, width)
        for table in (self.result_key, self.lag, self.bond):
            nn.init.normal_(table.weight, std=_INIT_STD)

    def forward(self, hidden: Tensor, edges: Tensor, result: Tensor, lag: Tensor, bond: Tensor) -> Tensor:
        key = (self.key(hidden) + self.result_key(result)).unflatten(1, (self.heads, -1))
        value = (self.value(hidden) + self.result_value(result)).unflatten(1, (self.heads, -1))
        query = self.query(hidden).unflatten(1, (self.heads, -1)) * key.shape[-1] ** -0.5
        bias = self.lag(lag) + self.bond(bond)
        attended = self.propagate(edges, query=query, key=key, value=value, bias=bias, size=None)
        output: Tensor = self.output(attended.flatten(1))
        return output

    def message(
        self, query_i: Tensor, key_j: Tensor, value_j: Tensor, bias: Tensor, index: Tensor, size_i: int
    ) -> Tensor:
        weights: Tensor = softmax((query_i * key_j).sum(-1) + bias, index, num_nodes=size_i)
        return value_j * weights[..., None]
