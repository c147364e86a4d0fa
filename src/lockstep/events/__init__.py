"""Everything in the run folder: how it is written and read; training and watching share nothing else."""
