"""`lockstep doctor`: check whether this machine is ready for training."""
