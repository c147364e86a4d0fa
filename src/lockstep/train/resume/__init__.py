"""How a run is saved, found again and continued, on any number of processes."""
