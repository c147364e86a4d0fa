"""Which samples a process sees, and in what order."""
