"""The wing's genes: their bounds are what a designer would try, some of them beyond what the rules allow.

The numbers are ours, in the manner of Formula 1's rules and of the wings one sees there; they are no team's.
"""

from collections.abc import Mapping
from typing import Any

from lockstep.recipes.wing.sections import THICKEST_AT
from lockstep.recipes.wing.structure import CARBONS
from lockstep.recipes.wing.units import Quantity
from lockstep.search.genome import ChoiceGene, FloatGene, Genome, IntegerGene

_LENGTH = Quantity("length", 0.02, 3.0)
_SLOT = Quantity("length", -0.05, 0.05)
_SHARE = Quantity("ratio", 0.0, 1.0)
_ANGLE = Quantity("angle", -1.0, 1.0)
_NUMBER = Quantity("ratio", 0.0, 100.0)

QUANTITIES: Mapping[str, Quantity] = {
    "span": Quantity("length", 0.5, 3.0),
    "ride_height": _LENGTH,
    "main_chord": _LENGTH,
    "main_camber": _SHARE,
    "main_camber_at": _SHARE,
    "main_thickness": _SHARE,
    "main_thickest": _NUMBER,
    "main_angle": _ANGLE,
    "flap_chord": _LENGTH,
    "flap_camber": _SHARE,
    "flap_camber_at": _SHARE,
    "flap_thickness": _SHARE,
    "flap_angle": _ANGLE,
    "slot_gap": _SLOT,
    "slot_overlap": _SLOT,
    "endplate_height": _LENGTH,
    "endplate_length": _LENGTH,
    "plies": _NUMBER,
    "carbon": _NUMBER,
}


def genome() -> Genome:
    return Genome(
        [
            FloatGene("span", 1.4, 2.1, group="plan", unit="m"),
            FloatGene("ride_height", 0.03, 0.20, group="plan", unit="m"),  # the lowest point's, above the ground
            FloatGene("main_chord", 0.18, 0.40, group="main", unit="m"),
            FloatGene("main_camber", 0.0, 0.09, group="main"),  # shares of the element's chord
            FloatGene("main_camber_at", 0.3, 0.6, group="main"),
            FloatGene("main_thickness", 0.06, 0.18, group="main"),
            ChoiceGene("main_thickest", THICKEST_AT, group="main"),
            FloatGene("main_angle", -6.0, 10.0, group="main", unit="deg"),  # positive: more downforce
            FloatGene("flap_chord", 0.08, 0.25, group="flap", unit="m"),
            FloatGene("flap_camber", 0.0, 0.09, group="flap"),
            FloatGene("flap_camber_at", 0.3, 0.6, group="flap"),
            FloatGene("flap_thickness", 0.06, 0.16, group="flap"),
            FloatGene("flap_angle", 5.0, 40.0, group="flap", unit="deg"),  # from the main element's chord
            FloatGene("slot_gap", 3.0, 30.0, group="slot", unit="mm"),
            FloatGene("slot_overlap", -10.0, 25.0, group="slot", unit="mm"),
            FloatGene("endplate_height", 0.10, 0.40, group="endplate", unit="m"),
            FloatGene("endplate_length", 0.20, 0.70, group="endplate", unit="m"),
            IntegerGene("plies", 2, 12, group="shell"),
            ChoiceGene("carbon", tuple(CARBONS), group="shell"),
        ]
    )


BASE: Mapping[str, Any] = {
    "span": 1.8,
    "ride_height": 0.08,
    "main_chord": 0.28,
    "main_camber": 0.04,
    "main_camber_at": 0.45,
    "main_thickness": 0.12,
    "main_thickest": 0.3,
    "main_angle": 1.0,
    "flap_chord": 0.14,
    "flap_camber": 0.04,
    "flap_camber_at": 0.45,
    "flap_thickness": 0.10,
    "flap_angle": 18.0,
    "slot_gap": 10.0,
    "slot_overlap": 4.0,
    "endplate_height": 0.20,
    "endplate_length": 0.45,
    "plies": 5,
    "carbon": "standard",
}
"""A careful first wing, drawn by hand."""
