"""A NaN or an infinity in a step: which lane of which rank it came from, and in which parameters, in words.

A loss that is not finite shows in the table of all lanes' losses. A gradient that is not finite although all losses are
is looked for lane by lane: each rank runs its lanes again, as far as it knows how.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.nn import Parameter

from lockstep.data.lanes import Lanes
from lockstep.engine.engine import LanePass
from lockstep.engine.finite import all_finite
from lockstep.engine.reduced import Reduced
from lockstep.errors import LockstepError
from lockstep.train.options import OnNonFinite
from lockstep.world.objects import all_gather_object

_MOST_NAMED = 4


class NonFiniteError(LockstepError):
    """A loss or a gradient is NaN or infinite, and the run was told to stop at that."""


class LaneGradients(NamedTuple):
    lane: int
    gradients: list[tuple[Parameter, Tensor | None]]


Replay = Callable[[], Iterator[LaneGradients]]


class Suspect(Protocol):
    """A pass over the lanes that ended in something that is not finite."""

    lane_pass: LanePass
    parameters: list[Parameter]
    replay: Replay | None  # runs this rank's lanes again; None: only the user's loop can


class Investigator:
    """Says what happened, to `tell` and on rank 0's behalf, and stops the run if that is what was asked for."""

    def __init__(
        self, policy: OnNonFinite, lanes: Lanes, names: Mapping[Parameter, str], tell: Callable[[int, str], None]
    ) -> None:
        self._policy = policy
        self._lanes = lanes
        self._names = names
        self._tell = tell

    def report(self, step: int, suspects: Sequence[Suspect], reduced: Reduced) -> None:
        """All ranks come here together."""
        parameters = [parameter for suspect in suspects for parameter in suspect.parameters]
        is_spoiled = zip(parameters, reduced.nonfinite(parameters), strict=True)
        spoiled = [self._name(parameter) for parameter, spoiled in is_spoiled if spoiled]
        text = f"step {step}: {self._origin(suspects)}"
        if spoiled:
            text += f"; not finite over all lanes: the gradient of {_listed(spoiled)}"
        if self._policy == "skip":
            text += "; the step is skipped"
        self._tell(step, text)
        if self._policy != "skip":
            raise NonFiniteError(f"{text} (on_nonfinite=skip would leave such steps out)")

    def _origin(self, suspects: Sequence[Suspect]) -> str:
        lanes = sorted({lane for suspect in suspects for lane in suspect.lane_pass.nonfinite_lanes()})
        if lanes:
            return f"the loss is not finite in {_listed([self._place(lane) for lane in lanes], ' and in ')}"
        if any(suspect.replay is None for suspect in suspects):
            hint = "step.accumulate could name the lane, but not under a mesh"
            return f"the gradient is not finite although every lane's loss is ({hint})"
        found: dict[int, list[str]] = {}  # a lane may have been run for several models
        for theirs in all_gather_object(self._found_again(suspects)):
            for lane, names in theirs:
                found.setdefault(lane, []).extend(names)
        places = [f"{self._place(lane)}, there of {_listed(found[lane])}" for lane in sorted(found)]
        return f"the gradient is not finite in {_listed(places, ' and in ')}" if places else "the gradients overflow"

    def _found_again(self, suspects: Sequence[Suspect]) -> list[tuple[int, list[str]]]:
        """This rank's lanes whose own gradients are not finite, and the parameters concerned."""
        found: list[tuple[int, list[str]]] = []
        for suspect in suspects:
            for lane, gradients in suspect.replay() if suspect.replay else ():
                if names := self._nonfinite(gradients):
                    found.append((lane, names))
        return found

    def _nonfinite(self, gradients: Iterable[tuple[Parameter, Tensor | None]]) -> list[str]:
        return [
            self._name(parameter)
            for parameter, gradient in gradients
            if gradient is not None and not all_finite([gradient])
        ]

    def _name(self, parameter: Parameter) -> str:
        return self._names.get(parameter, "(a parameter without a name)")

    def _place(self, lane: int) -> str:
        return f"lane {lane} (rank {self._lanes.owner(lane)})"


def _listed(items: Sequence[Any], separator: str = ", ") -> str:
    shown = separator.join(items[:_MOST_NAMED])
    return f"{shown} and {len(items) - _MOST_NAMED} more" if len(items) > _MOST_NAMED else shown
