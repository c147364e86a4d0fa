"""Is it the same on one process and on several? Runs of a config or a script, made to be compared, and the verdict."""
