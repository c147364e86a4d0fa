"""NaN and infinity: finds the lane, the rank and the parameters that a non-finite loss or gradient came from.

A loss that is not finite shows in the table of all lanes' losses. If all losses are finite but a gradient is not, each
rank runs its lanes again, if it knows the loss function, and checks every lane's own gradients.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.nn import Parameter

from lockstep.data.lanes import Lanes
from lockstep.engine.engine import GradientPass, ReducedGradients
from lockstep.engine.gradient_math import all_finite
from lockstep.errors import LockstepError
from lockstep.train.step_options import OnNonFinite
from lockstep.world.object_collectives import all_gather_object

_MAX_NAMES = 4


class NonFiniteError(LockstepError):
    """A loss or a gradient is NaN or infinite, and `on_nonfinite` is "stop"."""


class LaneGradients(NamedTuple):
    """The gradients of one lane alone."""

    lane: int
    gradients: list[tuple[Parameter, Tensor | None]]


Replay = Callable[[], Iterator[LaneGradients]]


class Suspect(Protocol):
    """A pass over the lanes whose loss or gradients are not finite."""

    lane_pass: GradientPass
    parameters: list[Parameter]
    replay: Replay | None  # runs this rank's lanes again; None: only the script's own loop can


class Investigator:
    """Reports where a non-finite value came from, through `report_incident`, and raises unless updates are skipped."""

    def __init__(
        self,
        policy: OnNonFinite,
        lanes: Lanes,
        names: Mapping[Parameter, str],
        report_incident: Callable[[int, str], None],
    ) -> None:
        self._policy = policy
        self._lanes = lanes
        self._names = names
        self._report_incident = report_incident

    def report(self, step: int, suspects: Sequence[Suspect], reduced: ReducedGradients) -> None:
        """Report the origin, and raise unless the update is to be skipped. All ranks must call it together."""
        parameters = [parameter for suspect in suspects for parameter in suspect.parameters]
        is_spoiled = zip(parameters, reduced.nonfinite(parameters), strict=True)
        spoiled = [self._name(parameter) for parameter, spoiled in is_spoiled if spoiled]
        text = f"step {step}: {self._origin(suspects)}"
        if spoiled:
            text += f"; not finite over all lanes: the gradient of {_listed(spoiled)}"
        if self._policy == "skip":
            text += "; the update is skipped"
        self._report_incident(step, text)
        if self._policy != "skip":
            raise NonFiniteError(f"{text} (on_nonfinite=skip would skip such updates)")

    def _origin(self, suspects: Sequence[Suspect]) -> str:
        lanes = sorted({lane for suspect in suspects for lane in suspect.lane_pass.nonfinite_lanes()})
        if lanes:
            return f"the loss is not finite in {_listed([self._place(lane) for lane in lanes], ' and in ')}"
        if any(suspect.replay is None for suspect in suspects):
            hint = "step.accumulate names the lane, except under a mesh"
            return f"the gradient is not finite although every lane's loss is ({hint})"
        found: dict[int, list[str]] = {}  # a lane may have been run for several models
        for theirs in all_gather_object(self._found_again(suspects)):
            for lane, names in theirs:
                found.setdefault(lane, []).extend(names)
        places = [f"{self._place(lane)}, for {_listed(found[lane])}" for lane in sorted(found)]
        return f"the gradient is not finite in {_listed(places, ' and in ')}" if places else "the gradients overflow"

    def _found_again(self, suspects: Sequence[Suspect]) -> list[tuple[int, list[str]]]:
        """Return this rank's lanes whose own gradients are not finite, and the parameters concerned."""
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
    shown = separator.join(items[:_MAX_NAMES])
    return f"{shown} and {len(items) - _MAX_NAMES} more" if len(items) > _MAX_NAMES else shown
