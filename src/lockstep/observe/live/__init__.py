"""`lockstep watch`: a run as it goes on, in the terminal or on a page in the browser."""
