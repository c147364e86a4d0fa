"""Read a run folder, or receive its events, and describe the run; nothing here can disturb training."""
