"""The entry point of the `lockstep` command, also by `python -m lockstep` and `torchrun -m lockstep train …`."""

from lockstep.supervision.stop_signals import install_stop_handlers


def main() -> None:
    """Run the command."""
    install_stop_handlers()  # first: importing the commands takes a tenth of a second
    from lockstep.cli import main as run_command

    run_command()


if __name__ == "__main__":
    main()
