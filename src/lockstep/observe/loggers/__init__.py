"""Loggers: what a run tells, shown by TensorBoard and Weights & Biases. The run folder's own files need none of it."""
