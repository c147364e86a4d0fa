"""Watching a run: everything here takes events in or reads the run folder, and can never disturb training."""
