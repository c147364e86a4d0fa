"""What a training step asks of an engine, whichever way gradients come together."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from torch.nn import Parameter

from lockstep.engine.table import Terms


class LanePass(Protocol):
    """One pass over this rank's lanes, which ends in gradients."""

    def open_lane(self, lane: int, size: int) -> None: ...

    def backward(self, terms: Terms, *, more: bool, retain_graph: bool = False) -> None:
        """`more`: another backward pass follows in the same lane."""
        ...

    def close_lane(self) -> None: ...

    def end(self) -> None:
        """All lanes are closed."""
        ...

    def finish(self) -> None:
        """Wait until the gradients over all lanes of all ranks, divided by the counts, stand in `.grad`."""
        ...

    def loss(self) -> Tensor:
        """Over all lanes of all ranks; after `finish`."""
        ...


class Engine(Protocol):
    def start_pass(self, parameters: Sequence[Parameter]) -> LanePass: ...

    def close(self, *, abandon: bool = False) -> None:
        """`abandon`: the loop was left in the middle, perhaps by a failure; do not wait for other ranks."""
        ...
