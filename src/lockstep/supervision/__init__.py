"""How the processes of a job are doing, seen from outside: their pulse, their stacks, and how they ended."""
