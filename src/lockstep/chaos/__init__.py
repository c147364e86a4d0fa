"""`lockstep chaos`: train while processes are killed and stopped, and check that nothing was lost."""
