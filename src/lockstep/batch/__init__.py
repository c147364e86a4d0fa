"""`lockstep batch`: find the largest batch that fits into memory, and the fastest, by trying."""
