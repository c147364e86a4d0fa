"""Where a command that tries something out leaves its runs."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.errors import UserError


class TrialFolder:
    def __init__(self, path: Path, *, is_kept: bool) -> None:
        self.path = path
        self.is_kept = is_kept  # may be set: there is something to see in it


@contextmanager
def trial_folder(keep: Path | None, name: str) -> Iterator[TrialFolder]:
    """The user's, new or empty; else one that is gone afterwards, unless it is to be kept."""
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise UserError(f"--keep {keep}: expected a folder that is new or empty")
    try:
        path = Path(tempfile.mkdtemp(prefix=f"lockstep-{name}-")) if keep is None else keep
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = "a folder for temporary files" if keep is None else f"--keep {keep}"
        raise UserError(f"{what} cannot be made: {error.strerror or error}") from None
    folder = TrialFolder(path, is_kept=keep is not None)
    try:
        yield folder
    finally:
        if not folder.is_kept:
            shutil.rmtree(path)
