"""Where a recipe's images come from: a folder of the user's, whose files say what format it is, or none."""

from lockstep.errors import UserError
from lockstep.recipes.images.collection import ImageSplits
from lockstep.recipes.images.digits import load_digits


def load_images(path: str | None, test_every: int = 5) -> ImageSplits:
    """The images in this folder, or scikit-learn's digits, of which one in `test_every` is for the test."""
    if path is None:
        return load_digits(test_every)
    raise UserError(f"data.path={path}: no images in a known format")
