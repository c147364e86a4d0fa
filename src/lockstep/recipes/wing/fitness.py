"""What a wing is worth: performance, less what it costs to break rules or to bend.

    performance = (downforce − drag_weight × drag) / 1000 N
    fitness = performance × its weight − violations of rules × theirs − violations of structure × theirs

Violations grow smoothly from zero, so a wing just over a limit is just a little worse. With `pareto`, downforce, drag
and deflection are objectives of their own, and each is made worse by the same violations.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.recipes.wing.forces import Air, Loads, loads
from lockstep.recipes.wing.genes import QUANTITIES, genome
from lockstep.recipes.wing.geometry import Shape, shape
from lockstep.recipes.wing.rules import is_kept, smooth, violations
from lockstep.recipes.wing.structure import Strain, strain
from lockstep.recipes.wing.units import Converter
from lockstep.search.problem import Objective

_CLOSEST_M = 1e-3  # between the elements: nearer, the panels say nothing that is true
_MOST_DEFLECTION_M = 0.010
_MOST_STRESS = 0.5  # of the strength: a safety factor of two
_MOST_MASS_KG = 7.0
_TOLERANCE = 0.02  # of these limits
_FORCE_N = 1000.0  # the unit in which performance counts
_BEND_M = 0.010  # what a violation of one adds to a deflection, where that is an objective

SINGLE = (Objective("fitness", "max"),)
PARETO = (Objective("downforce", "max", "N"), Objective("drag", "min", "N"), Objective("deflection", "min", "m"))


class Weights(NamedTuple):
    performance: float = 1.0
    rules: float = 1.0
    structure: float = 1.0
    drag: float = 3.0  # newtons of downforce that a newton of drag must bring


class Assessment(NamedTuple):
    """All that is known of each design; where it is not sound, it counts for nothing."""

    shape: Shape
    is_sound: Tensor
    loads: Loads
    strain: Strain
    rules: Tensor  # (designs, rules)
    structure: Tensor  # (designs, limits)
    fitness: Tensor

    @property
    def is_legal(self) -> Tensor:
        """Rules and limits are kept, within tolerances."""
        return is_kept(torch.cat([self.rules, self.structure], dim=1)) & self.is_sound


class Assessor:
    """Assesses tables of designs. Each row stands for itself."""

    def __init__(self, num_panels: int = 40, air: Air | None = None, weights: Weights | None = None) -> None:
        self.genome = genome()
        self.num_panels = num_panels  # of each element
        self.air = air or Air()
        self.weights = weights or Weights()
        self._converter = Converter(self.genome, QUANTITIES)

    def fitness(self, designs: Tensor) -> Tensor:
        return self.assess(designs).fitness.unsqueeze(1)

    def trade(self, designs: Tensor) -> Tensor:
        """Downforce, drag and deflection; each worse by what is violated."""
        found = self.assess(designs)
        penalty = self._penalty(found.rules, found.structure)
        downforce = found.loads.downforce - _FORCE_N * penalty
        drag = found.loads.drag + _FORCE_N * penalty
        deflection = found.strain.deflection_m + _BEND_M * penalty
        return torch.stack([downforce, drag, deflection], dim=1).masked_fill(~found.is_sound.unsqueeze(1), math.nan)

    def assess(self, designs: Tensor) -> Assessment:
        values = self._converter.to_si(designs)
        form = shape(values, self.num_panels)
        is_sound = form.is_possible & (form.clearance >= _CLOSEST_M)
        plate = values["endplate_height"], values["endplate_length"]
        found = loads(form.points, form.chords, values["span"], *plate, self.air)
        bent = strain(form.points, values, found.downforce)
        rules = violations(form, values)
        structure = _structure(bent)
        performance = (found.downforce - self.weights.drag * found.drag) / _FORCE_N
        fitness = self.weights.performance * performance - self._penalty(rules, structure)
        return Assessment(form, is_sound, found, bent, rules, structure, fitness.masked_fill(~is_sound, math.nan))

    def _penalty(self, rules: Tensor, structure: Tensor) -> Tensor:
        return self.weights.rules * rules.sum(1) + self.weights.structure * structure.sum(1)


def _structure(bent: Strain) -> Tensor:
    limits = bent.mass_kg.new_tensor([_MOST_DEFLECTION_M, _MOST_STRESS, _MOST_MASS_KG])
    share = torch.stack([bent.deflection_m, bent.stress_share, bent.mass_kg], dim=1) / limits
    return smooth(torch.relu(share - 1) / _TOLERANCE)
