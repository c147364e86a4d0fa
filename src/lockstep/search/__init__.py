"""Evolutionary search with a network trained alongside: genome, operators, evaluation pool, the loop."""
