"""Supervises the processes of a job from outside: heartbeats, stacks, crash and hang reports."""
