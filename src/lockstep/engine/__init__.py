"""How a step's gradients come together."""
