"""Parallel strategies: how a model, its gradients and its optimizers are spread over the ranks."""
