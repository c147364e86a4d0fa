"""Where a recipe's images come from: a folder of the user's, whose files say what format it is, or none."""

from pathlib import Path

from lockstep.errors import UserError
from lockstep.recipes.images.cifar import CIFAR10, CIFAR100, load_cifar
from lockstep.recipes.images.collection import ImageSplits
from lockstep.recipes.images.digits import load_digits
from lockstep.recipes.images.idx import has_idx, load_idx

_MOST_SHOWN = 5  # files, where none is known


def load_images(path: str | None, test_every: int = 5) -> ImageSplits:
    """The images in this folder, or scikit-learn's digits, of which one in `test_every` is for the test."""
    if path is None:
        return load_digits(test_every)
    try:
        folder = Path(path).expanduser()
        if not folder.is_dir():
            what = "not a folder" if folder.exists() else "no such folder"
            raise UserError(f"data.path={path}: {what} (from {Path.cwd()})")
        names = sorted(file.name for file in folder.iterdir())
    except (OSError, ValueError, RuntimeError) as error:  # the last: no home to expand ~ to
        raise UserError(f"data.path={path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    for layout in (CIFAR10, CIFAR100):
        if layout.test in names or any(folder.glob(layout.train)):
            return load_cifar(folder, layout)
    if has_idx(folder):
        return load_idx(folder)
    shown = ", ".join([*map(ascii, names[:_MOST_SHOWN]), *(["…"] if len(names) > _MOST_SHOWN else [])]) or "nothing"
    raise UserError(
        f"data.path={path}: no images in a known format: expected CIFAR-10's {CIFAR10.train} and {CIFAR10.test}, "
        f"CIFAR-100's {CIFAR100.train} and {CIFAR100.test}, or MNIST's train-images-idx3-ubyte and so on; found {shown}"
    )
