"""Load a recipe's images: from a folder in CIFAR's or MNIST's format, or scikit-learn's digits."""

from pathlib import Path

import torch

from lockstep.errors import UserError
from lockstep.recipes.images.image_formats import CIFAR10, CIFAR100, has_idx, load_cifar, load_idx
from lockstep.recipes.images.image_splits import Images, ImageSplits

_MAX_SHOWN = 5  # file names in an error message


def load_images(path: str | None, test_every: int = 5) -> ImageSplits:
    """Load the images in a folder or, without one, scikit-learn's digits; every `test_every`-th digit is held out."""
    if path is None:
        return load_digits(test_every)
    try:
        folder = Path(path).expanduser()
        if not folder.is_dir():
            what = "not a folder" if folder.exists() else "no such folder"
            raise UserError(f"data.path={path}: {what} (from {Path.cwd()})")
        names = sorted(file.name for file in folder.iterdir())
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: no home directory for ~
        raise UserError(f"data.path={path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    for layout in (CIFAR10, CIFAR100):
        if layout.test in names or any(folder.glob(layout.train)):
            return load_cifar(folder, layout)
    if has_idx(folder):
        return load_idx(folder)
    shown = ", ".join([*map(ascii, names[:_MAX_SHOWN]), *(["…"] if len(names) > _MAX_SHOWN else [])]) or "nothing"
    raise UserError(
        f"data.path={path}: no images in a known format: expected CIFAR-10's {CIFAR10.train} and {CIFAR10.test}, "
        f"CIFAR-100's {CIFAR100.train} and {CIFAR100.test}, or MNIST's train-images-idx3-ubyte and so on; found {shown}"
    )


_MAX_BRIGHTNESS = 16


def load_digits(test_every: int = 5) -> ImageSplits:
    """Load scikit-learn's 1,797 digits of 8 × 8 pixels. Image i is a test image when i % test_every == 0."""
    if test_every == 1:
        raise UserError(
            "data.test_every=1: every digit would be a test image, with none left for training: expected 2 or more"
        )
    try:
        from sklearn import datasets
    except ImportError:
        raise UserError(
            "the digits need scikit-learn: pip install 'lockstep-train[digits]', or give data.path=FOLDER"
        ) from None
    digits = datasets.load_digits()
    pixels = (torch.tensor(digits.images) * (255 / _MAX_BRIGHTNESS)).round().to(torch.uint8).unsqueeze(1)
    labels = torch.tensor(digits.target)
    is_test = torch.arange(len(labels)) % test_every == 0
    train, test = (Images(pixels[chosen], labels[chosen]) for chosen in (~is_test, is_test))
    return ImageSplits(train, test, tuple("0123456789"))
