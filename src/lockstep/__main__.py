"""`python -m lockstep`, and so `torchrun -m lockstep train …`, is the `lockstep` command."""

from lockstep.cli import main

main()
