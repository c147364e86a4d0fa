"""Run the `lockstep` command by `python -m lockstep`, and so by `torchrun -m lockstep train …`."""

from lockstep.cli import main

main()
