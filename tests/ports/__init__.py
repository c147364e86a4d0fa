"""Scripts as users write them, taken to lockstep: each gives one result on any number of processes, and after kills."""
