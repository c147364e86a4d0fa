"""Watching the processes of a job from outside: heartbeats, stacks, hangs, and how they ended."""
