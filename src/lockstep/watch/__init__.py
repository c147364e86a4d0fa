"""`lockstep watch`: follow a run live, in the terminal or in the browser."""
