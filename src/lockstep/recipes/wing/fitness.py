"""The fitness of a wing: performance, less penalties for breaking rules and structural limits.

    performance = (downforce − drag_weight × drag) / 1000 N
    fitness = performance × its weight − rule violations × their weight − structural violations × their weight

Violations grow smoothly from zero, so a wing just over a limit is only a little worse. With `pareto`, downforce, drag
and deflection are separate objectives, each made worse by the same violations.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.recipes.wing.forces import Air, Loads, loads
from lockstep.recipes.wing.genes import QUANTITIES, Converter, wing_genome
from lockstep.recipes.wing.geometry import WingShape, shape
from lockstep.recipes.wing.wing_limits import Strain, is_kept, smooth, strain, violations
from lockstep.search.problem import Objective

_MIN_CLEARANCE_M = 1e-3  # between the elements; the panel method is invalid below it
_MAX_DEFLECTION_M = 0.010
_MAX_STRESS = 0.5  # of the strength: a safety factor of two
_MAX_MASS_KG = 7.0
_TOLERANCE = 0.02  # of these limits
_FORCE_N = 1000.0  # the unit of performance
_DEFLECTION_PENALTY_M = 0.010  # added per unit of violation, where deflection is an objective

SINGLE_OBJECTIVE = (Objective("fitness", "max"),)
PARETO_OBJECTIVES = (
    Objective("downforce", "max", "N"),
    Objective("drag", "min", "N"),
    Objective("deflection", "min", "m"),
)


class FitnessWeights(NamedTuple):
    """The weights of the terms of the fitness."""

    performance: float = 1.0
    rules: float = 1.0
    structure: float = 1.0
    drag: float = 3.0  # one newton of drag costs as much as this many newtons of downforce


class Assessment(NamedTuple):
    """Everything computed for each design; where `is_sound` is false, the fitness is NaN."""

    shape: WingShape
    is_sound: Tensor
    loads: Loads
    strain: Strain
    rules: Tensor  # (designs, rules)
    structure: Tensor  # (designs, limits)
    fitness: Tensor

    @property
    def is_legal(self) -> Tensor:
        """Whether all rules and limits are kept, within tolerances."""
        return is_kept(torch.cat([self.rules, self.structure], dim=1)) & self.is_sound


class Assessor:
    """Assesses many designs at a time, a row each; rows do not affect each other."""

    def __init__(self, num_panels: int = 40, air: Air | None = None, weights: FitnessWeights | None = None) -> None:
        self.genome = wing_genome()
        self.num_panels = num_panels  # per element
        self.air = air or Air()
        self.weights = weights or FitnessWeights()
        self._converter = Converter(self.genome, QUANTITIES)

    def fitness(self, designs: Tensor) -> Tensor:
        """Return the single objective, (designs, 1)."""
        return self.assess(designs).fitness.unsqueeze(1)

    def trade(self, designs: Tensor) -> Tensor:
        """Return the three objectives, (designs, 3): downforce, drag and deflection, each made worse by violations."""
        found = self.assess(designs)
        penalty = self._penalty(found.rules, found.structure)
        downforce = found.loads.downforce - _FORCE_N * penalty
        drag = found.loads.drag + _FORCE_N * penalty
        deflection = found.strain.deflection_m + _DEFLECTION_PENALTY_M * penalty
        return torch.stack([downforce, drag, deflection], dim=1).masked_fill(~found.is_sound.unsqueeze(1), math.nan)

    def assess(self, designs: Tensor) -> Assessment:
        """Compute shape, forces, response and violations of each design."""
        values = self._converter.to_si(designs)
        form = shape(values, self.num_panels)
        is_sound = form.is_possible & (form.clearance >= _MIN_CLEARANCE_M)
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
    limits = bent.mass_kg.new_tensor([_MAX_DEFLECTION_M, _MAX_STRESS, _MAX_MASS_KG])
    share = torch.stack([bent.deflection_m, bent.stress_share, bent.mass_kg], dim=1) / limits
    return smooth(torch.relu(share - 1) / _TOLERANCE)
