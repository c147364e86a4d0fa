"""Training under attack: a plan drawn from a seed, the driver that carries it out, and the checks afterwards."""
