"""The data sets and loaders: images with labels, out-of-distribution images, and pairs of both.

The recipe trains on pairs: sample i is image i, its label, and an outsider drawn anew in every epoch. For your own loop
there are `get_indist_dataloader` and `get_outdist_dataloader`, over the same sets.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from lockstep.data.lane_loader import LaneLoader
from lockstep.data.sample_source import dataset_length
from lockstep.errors import UserError
from lockstep.recipes.ebm.out_of_distribution import TRAINED, UNSEEN, GeneratedImages
from lockstep.recipes.images.image_source import load_images
from lockstep.recipes.images.image_splits import Augmented, Images, ImageSplits, format_shape
from lockstep.world.collectives import get_rank, get_world_size
from lockstep.world.world import World

FOLDER = "folder"  # the family name of the user's own outsiders

_NUM_GENERATED = 2**20  # outsiders to draw from in training; few are drawn twice
_TEST_SEED = 0  # the same test outsiders in every run


class Sources(NamedTuple):
    """The images, and the user's own outsiders if there are any."""

    images: ImageSplits
    outsiders: ImageSplits | None

    @property
    def unseen_families(self) -> tuple[str, ...]:
        """The outsider families of the test. Training uses other families, and other images of the folder."""
        return (*UNSEEN, *([] if self.outsiders is None else [FOLDER]))


def open_sources(path: str | None, out_path: str | None, test_every: int = 5) -> Sources:
    """Load images and outsiders from folders; by default, scikit-learn's digits and generated outsiders."""
    images = load_images(path, test_every)
    given = "the digits" if path is None else f"data.path={path}"
    if images.test.labels.min() == images.test.labels.max():
        raise UserError(f"{given}: all test images have one class: expected two or more classes")
    if out_path is None:
        return Sources(images, None)
    outsiders = _load_outsiders(out_path, test_every)
    if outsiders.shape != images.shape:
        raise UserError(
            f"data.out_path={out_path}: images of {format_shape(outsiders.shape)}, but those of "
            f"{given} are of {format_shape(images.shape)}: give outsiders of the same shape"
        )
    return Sources(images, outsiders)


def _load_outsiders(path: str, test_every: int) -> ImageSplits:
    try:
        return load_images(path, test_every)
    except UserError as error:
        raise UserError(str(error).replace("data.path=", "data.out_path=", 1)) from None


class PlainImages(Dataset[Tensor]):
    """Images without labels, as floats from 0 to 1."""

    def __init__(self, images: Images) -> None:
        self._pixels = images.pixels

    def __len__(self) -> int:
        return len(self._pixels)

    def __getitem__(self, index: int) -> Tensor:
        return self._pixels[index].float() / 255


class LabelledImages(Dataset[tuple[Tensor, Tensor]]):
    """Images converted from bytes to floats from 0 to 1, with labels."""

    def __init__(self, images: Dataset[Any]) -> None:
        self._images = images

    def __len__(self) -> int:
        return dataset_length(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        pixels, label = self._images[index]
        return pixels.float() / 255, label


class Pairs(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """The training set: each image with its label and an outsider, drawn from the loader's key for the sample."""

    def __init__(self, images: LabelledImages, outsiders: Dataset[Tensor]) -> None:
        self._images = images
        self._outsiders = outsiders
        self._num_outsiders = dataset_length(outsiders)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        image, label = self._images[index]
        return image, label, self._outsiders[int(torch.randint(self._num_outsiders, ()))]


class EvaluationImages(Dataset[tuple[Tensor, Tensor, Tensor, Tensor]]):
    """The test set: each image with its label, an outsider of the trained families, and one of each unseen family."""

    def __init__(self, sources: Sources) -> None:
        test = sources.images.test
        self._images = LabelledImages(TensorDataset(*test))
        self._known = _trained_outsiders(sources, test, _TEST_SEED)
        self._unseen: list[Any] = [
            GeneratedImages({name: family}, test, _NUM_GENERATED, _TEST_SEED) for name, family in UNSEEN.items()
        ]
        if sources.outsiders is not None:
            self._unseen.append(PlainImages(sources.outsiders.test))

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        image, label = self._images[index]
        known = self._known[index % dataset_length(self._known)]
        return image, label, known, torch.stack([family[index % len(family)] for family in self._unseen])


def pairs(sources: Sources, seed: int, *, padding: int = 0, flip: bool = False) -> Pairs:
    """Return the training set; `padding` and `flip` augment images anew in every epoch."""
    train = sources.images.train
    return Pairs(LabelledImages(Augmented(train, padding, flip)), _trained_outsiders(sources, train, seed))


def get_indist_dataloader(
    sources: Sources, batch_size: int, *, world: World | None = None, seed: int = 0, lanes: int | None = None
) -> LaneLoader:
    """Return a loader of (image, label), divided over all processes: each training image exactly once per epoch.

    Pass the loader to `run.steps(…)`, or iterate over its `batches()`.

    Args:
        sources: what `open_sources` returned.
        batch_size: the number of images per batch, over all processes.
        world: this process's place in the job; that of the process group if omitted.
        seed: decides the order of the images.
        lanes: the number of lanes in a batch; chosen from the batch size if omitted.
    """
    return _loader(LabelledImages(TensorDataset(*sources.images.train)), batch_size, world, seed, lanes)


def get_outdist_dataloader(
    sources: Sources, batch_size: int, *, world: World | None = None, seed: int = 0, lanes: int | None = None
) -> LaneLoader:
    """Return a loader of out-of-distribution images: the user's own, or generated ones of the trained families.

    Takes the same arguments as `get_indist_dataloader`; the seed also decides which images are generated.
    """
    outsiders = _trained_outsiders(sources, sources.images.train, seed)
    return _loader(outsiders, batch_size, world, seed, lanes)


def _loader(dataset: Dataset[Any], batch_size: int, world: World | None, seed: int, lanes: int | None) -> LaneLoader:
    place = World(rank=get_rank(), size=get_world_size()) if world is None else world
    # A short last batch keeps every image, and every process still has the same number of batches.
    return LaneLoader(dataset, batch_size, place, lanes=lanes or "auto", seed=seed, tail="short")


def _trained_outsiders(sources: Sources, originals: Images, seed: int) -> Any:
    if sources.outsiders is None:
        return GeneratedImages(TRAINED, originals, _NUM_GENERATED, seed)
    return PlainImages(sources.outsiders.train)
