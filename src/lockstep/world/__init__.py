"""Who is in the job and how they talk: rank, size, device, backend; collectives; keyed randomness."""
