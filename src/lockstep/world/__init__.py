"""The process group: rank, world size, device and backend; collectives; keyed random numbers."""
