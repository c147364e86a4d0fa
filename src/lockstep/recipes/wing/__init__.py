"""A racing car's front wing of two elements near the ground: shape, flow, forces, structure, rules, fitness."""
