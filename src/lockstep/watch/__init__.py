"""`lockstep watch`: a run live, in the terminal or in the browser."""
