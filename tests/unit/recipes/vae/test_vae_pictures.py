"""The vae recipe's pictures: which image is where."""

import torch

from lockstep.recipes.images.image_grid import mosaic
from lockstep.recipes.vae import vae_pictures
from lockstep.recipes.vae.autoencoder import Autoencoder, ImageShape
from lockstep.world.keyed_random import keyed_generator


def small_model() -> Autoencoder:
    torch.manual_seed(0)
    return Autoencoder(ImageShape(1, 8, 8), latent=3, width=4, likelihood="gaussian", beta=1.0).eval()


def tiles(picture: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the images in a picture of ten columns, without the frames, as (rows, columns, 1, 8, 8)."""
    side = (picture.shape[2] + 1) // 10  # with the line after it
    factor = (side - 1) // 10
    found = [
        picture[:, row * side : (row + 1) * side - 1, column * side : (column + 1) * side - 1][:, ::factor, ::factor]
        for row in range(rows)
        for column in range(10)
    ]
    return torch.stack(found)[:, :, 1:-1, 1:-1].unflatten(0, (rows, 10))


@torch.no_grad()
def test_each_original_is_above_its_reconstruction() -> None:
    model = small_model()
    images = torch.randint(0, 256, (40, 1, 8, 8), dtype=torch.uint8)
    shown = tiles(vae_pictures.reconstructions(model, images), rows=6)
    originals = images[:30].float() / 255
    torch.testing.assert_close(shown[0::2].flatten(0, 1), originals)
    torch.testing.assert_close(shown[1::2].flatten(0, 1), model.decode(model.encode(originals).mean))


@torch.no_grad()
def test_an_interpolation_leads_from_one_image_to_another() -> None:
    model = small_model()
    images = torch.rand(20, 1, 8, 8)
    shown = tiles(vae_pictures.walks(model, images), rows=6)
    ends = model.decode(model.encode(images[:12]).mean)
    torch.testing.assert_close(shown[:, 0], ends[:6])
    torch.testing.assert_close(shown[:, -1], ends[6:])


@torch.no_grad()
def test_samples_are_those_of_the_key_and_a_single_test_image_is_enough() -> None:
    model = small_model()
    expected = mosaic(torch.nn.functional.pad(model.draw(100, keyed_generator(5, "samples")), (1, 1, 1, 1)), 10)
    torch.testing.assert_close(vae_pictures.samples(model, keyed_generator(5, "samples")), expected)
    one = torch.rand(1, 1, 8, 8)
    assert vae_pictures.reconstructions(model, one).shape[2] == vae_pictures.walks(model, one).shape[2]
