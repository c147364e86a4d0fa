"""Engines: how the gradients of a step are computed over all lanes of all ranks."""
