"""Checkpoints: safetensors files and a manifest with hashes, committed by a rename."""
