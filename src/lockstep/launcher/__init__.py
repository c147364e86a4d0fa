"""One agent per machine: start the processes, watch them, explain how they ended."""
