"""`lockstep init`: write a training script to start from."""
