"""`lockstep plan`: predict how fast a run would be on more processes."""
