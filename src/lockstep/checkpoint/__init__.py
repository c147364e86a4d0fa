"""Checkpoints: safetensors and a manifest with hashes, committed by a rename."""
