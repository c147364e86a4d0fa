"""The ebm recipe's data: families of outsiders, pairs, and loaders that distribute both over the ranks."""

import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.data.lane_loader import LaneLoader
from lockstep.errors import UserError
from lockstep.recipes.ebm import loaders
from lockstep.recipes.ebm.loaders import (
    EvaluationImages,
    Sources,
    get_indist_dataloader,
    get_outdist_dataloader,
    open_sources,
    pairs,
)
from lockstep.recipes.ebm.out_of_distribution import TRAINED, UNSEEN, GeneratedImages, blends, cut_ups
from lockstep.recipes.images.image_splits import Images, ImageSplits
from lockstep.world.keyed_random import keyed_generator
from lockstep.world.world import World


def some_images(count: int, shape: tuple[int, int, int] = (1, 8, 8), seed: int = 0) -> Images:
    pixels = torch.randint(0, 256, (count, *shape), generator=keyed_generator(seed, "test"), dtype=torch.uint8)
    pixels[:, 0, 0, 0] = torch.arange(count)  # an image is known by its first pixel
    return Images(pixels, torch.arange(count) % 3)


def some_sources(outsiders: bool = False) -> Sources:
    def splits(seed: int) -> ImageSplits:
        return ImageSplits(some_images(29, seed=seed), some_images(7, seed=seed + 1), ("a", "b", "c"))

    return Sources(splits(0), splits(2) if outsiders else None)


def first_pixels(images: Tensor) -> list[int]:
    return [int(value) for value in (images[:, 0, 0, 0] * 255).round()]


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (1, 28, 28), (3, 9, 7)])
@pytest.mark.parametrize("name", [*TRAINED, *UNSEEN])
def test_each_family_draws_images_of_the_shape_by_their_number(name: str, shape: tuple[int, int, int]) -> None:
    family = {**TRAINED, **UNSEEN}[name]
    made = GeneratedImages({name: family}, some_images(60, shape), 100, seed=3)
    images = torch.stack([made[index] for index in range(20)])
    assert images.shape == (20, *shape)
    assert images.min() >= 0
    assert images.max() <= 1
    assert len({image.numpy().tobytes() for image in images}) >= 18, "they differ"
    before = torch.get_rng_state()
    assert torch.equal(made[7], images[7])
    assert torch.equal(torch.get_rng_state(), before)
    other_seed = GeneratedImages({name: family}, some_images(60, shape), 100, seed=4)
    assert not torch.equal(other_seed[7], images[7])


def test_families_take_turns() -> None:
    def plain(brightness: float) -> Callable[[Images, torch.Generator], Tensor]:
        return lambda _originals, _draw: torch.full((1, 1, 1), brightness)

    made = GeneratedImages({"dark": plain(0.1), "bright": plain(0.9)}, some_images(1), 5, seed=0)
    assert [round(made[index].item(), 1) for index in range(len(made))] == [0.1, 0.9, 0.1, 0.9, 0.1]


def test_the_test_set_has_families_that_training_does_not() -> None:
    assert not set(TRAINED) & set(UNSEEN)
    assert not set(TRAINED.values()) & set(UNSEEN.values())


def test_cut_ups_have_an_originals_pixels_in_another_order_and_blends_two_classes() -> None:
    originals = some_images(9)
    for number in range(30):
        pieces = (cut_ups(originals, keyed_generator(0, "cut", number)) * 255).round().byte()
        same_pixels = [torch.equal(pieces.flatten().sort().values, x.flatten().sort().values) for x in originals.pixels]
        assert sum(same_pixels) == 1
        assert not torch.equal(pieces, originals.pixels[same_pixels.index(True)])
        blend = blends(originals, keyed_generator(0, "blend", number)) * 255 * 2
        found = [
            (one, other)
            for one in range(9)
            for other in range(one)
            if torch.allclose(blend, originals.pixels[one].float() + originals.pixels[other].float(), atol=1e-3)
        ]
        assert len(found) == 1
        assert len({int(originals.labels[index]) for index in found[0]}) == 2


def epoch_of(loader: LaneLoader, epoch: int) -> list[list[Tensor]]:
    """Return what this rank's lanes get in an epoch."""
    numbers = range(epoch * len(loader), (epoch + 1) * len(loader))
    batches = loader.batches(numbers.start, numbers.stop)
    return [lane.data for batch in batches for lane in batch.lanes if lane.size]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_training_image_comes_once_an_epoch_on_any_number_of_ranks(size: int) -> None:
    orders = []
    for epoch in range(2):
        seen: list[int] = []
        for rank in range(size):
            loader = get_indist_dataloader(some_sources(), 8, world=World(rank=rank, size=size), seed=5)
            assert len(loader) == 4  # of 29 images, with five in the last
            for images, labels in epoch_of(loader, epoch):
                numbers = first_pixels(images)
                assert labels.tolist() == [number % 3 for number in numbers]
                seen += numbers
        assert sorted(seen) == list(range(29))
        orders.append(seen)
    assert orders[0] != orders[1]


@pytest.mark.parametrize("is_folder", [False, True])
def test_outsiders_are_shared_out_without_a_copy(is_folder: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "_NUM_GENERATED", 23)
    count = 29 if is_folder else 23
    shares = []
    for size in (1, 2):
        worlds = [World(rank=rank, size=size) for rank in range(size)]
        each = [get_outdist_dataloader(some_sources(is_folder), 8, world=world, seed=5) for world in worlds]
        shares.append([{image.numpy().tobytes() for lane in epoch_of(loader, 0) for image in lane} for loader in each])
    (alone,), (one, other) = shares
    assert len(alone) == count
    assert one | other == alone
    assert not one & other


def test_a_pair_has_its_own_image_and_another_outsider_in_every_epoch() -> None:
    loader = LaneLoader(pairs(some_sources(), seed=0), 29, World(), lanes=1, seed=1)
    (first,), (second,), (again,) = (epoch_of(loader, epoch) for epoch in (0, 1, 0))
    for images, labels, outsiders in (first, second):
        assert sorted(first_pixels(images)) == list(range(29))
        assert labels.tolist() == [number % 3 for number in first_pixels(images)]
        assert outsiders.shape == images.shape
    drawn = [{outsider.numpy().tobytes() for outsider in outsiders} for _, _, outsiders in (first, second, again)]
    assert drawn[0] == drawn[2]
    assert len(drawn[0] & drawn[1]) < 3


def test_training_images_are_shifted_and_mirrored_if_asked() -> None:
    loader = LaneLoader(pairs(some_sources(), seed=0, padding=2, flip=True), 29, World(), lanes=1, tail="short")
    ((images, _, _),) = epoch_of(loader, 0)
    originals = some_sources().images.train.pixels.float() / 255
    assert sum(any(torch.equal(image, original) for original in originals) for image in images) < 10


def test_the_test_pairs_each_image_with_every_unseen_family() -> None:
    for sources in (some_sources(), some_sources(outsiders=True)):
        test = EvaluationImages(sources)
        image, label, known, unseen = test[4]
        assert len(test) == 7
        assert (first_pixels(image[None]), int(label)) == ([4], 1)
        assert known.shape == image.shape
        assert unseen.shape == (len(sources.unseen_families), 1, 8, 8)
        assert torch.equal(test[4][3], unseen)
    assert sources.unseen_families == (*UNSEEN, "folder")
    assert sources.outsiders is not None
    assert torch.equal(unseen[-1], sources.outsiders.test.pixels[4].float() / 255), "the folder's test images"
    assert torch.equal(known, sources.outsiders.train.pixels[4].float() / 255), "training has others"


def write_idx(folder: Path, size: int, label_step: int = 1) -> str:
    folder.mkdir()
    for split, count in (("train", 20), ("t10k", 5)):
        pixels = bytes(count * size * size)
        (folder / f"{split}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, size, size) + pixels)
        labels = bytes(label_step * number % 10 for number in range(count))
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels)
    return str(folder)


def test_the_loop_in_the_readme_runs_through_an_epoch() -> None:
    text = (Path(loaders.__file__).parent / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["images"].shape[1:] == (1, 8, 8)
    assert len(names["images"]) == len(names["labels"]) > 0


def test_custom_outsiders_must_have_the_shape_of_the_data(tmp_path: Path) -> None:
    right, wrong = write_idx(tmp_path / "right", 8), write_idx(tmp_path / "wrong", 9)
    assert len(EvaluationImages(open_sources(right, right))) == 5
    with pytest.raises(UserError, match=r"data.out_path=.*wrong: images of 1 × 9 × 9, but .*right are of 1 × 8 × 8"):
        open_sources(right, wrong)
    with pytest.raises(UserError, match=r"^data.out_path=.*nowhere: no such folder"):
        open_sources(right, str(tmp_path / "nowhere"))


def test_images_of_one_class_cannot_be_blended(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="all test images have one class"):
        open_sources(write_idx(tmp_path / "one", 8, label_step=0), None)


def test_digits_of_one_class_are_called_digits() -> None:
    with pytest.raises(UserError, match=r"^the digits: all test images have one class"):
        open_sources(None, None, test_every=5000)
