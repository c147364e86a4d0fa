"""The agent of each machine: starts a job's processes, watches and restarts them, explains failures."""
