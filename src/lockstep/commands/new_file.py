"""Writing a file for the user: never over one that is there, unless that was asked for."""

from pathlib import Path

from lockstep.errors import UserError


def write_new(path: Path, text: str, remedy: str, *, force: bool = False) -> None:
    """`remedy`: what to do where there is one already. `force`: write over it."""
    try:
        with path.open("w" if force else "x") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{path} exists: {remedy}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
