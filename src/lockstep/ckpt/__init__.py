"""`lockstep ckpt`: list, verify, audit, compare and export checkpoints."""
