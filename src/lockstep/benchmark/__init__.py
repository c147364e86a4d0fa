"""What a step costs here, and whether the number of processes changes the answer: `lockstep bench`."""
