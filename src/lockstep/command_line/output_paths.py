"""Files and folders that commands write for the user; existing ones are never overwritten unless the user asks."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.errors import UserError


def write_new_file(path: Path, text: str, remedy: str, *, force: bool = False) -> None:
    """Write a file that must not exist yet.

    Args:
        path: where to write.
        text: what to write.
        remedy: the end of the error message if the file exists: what to do then.
        force: overwrite an existing file.
    """
    try:
        with path.open("w" if force else "x") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{path} exists: {remedy}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None


class TrialFolder:
    """The folder of a command that makes trial runs."""

    def __init__(self, path: Path, *, is_kept: bool) -> None:
        self.path = path
        self.is_kept = is_kept  # set it to True if the user should look at the runs


@contextmanager
def trial_folder(keep: Path | None, name: str) -> Iterator[TrialFolder]:
    """Provide a folder for a command's runs: `keep`, new or empty; or a temporary one, removed unless `is_kept`."""
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise UserError(f"--keep {keep}: expected a folder that is new or empty")
    try:
        path = Path(tempfile.mkdtemp(prefix=f"lockstep-{name}-")) if keep is None else keep
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = "a temporary folder" if keep is None else f"--keep {keep}"
        raise UserError(f"{what} cannot be created: {error.strerror or error}") from None
    folder = TrialFolder(path, is_kept=keep is not None)
    try:
        yield folder
    finally:
        if not folder.is_kept:
            shutil.rmtree(path)
