"""Residual networks: their sizes are the published ones."""

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.recipes.registry import load_recipe
from lockstep.recipes.resnet.resnet_network import VARIANTS, ResNet, ResNetBlock, Variant
from lockstep.train.optim.optimizer_factory import build_optimizer
from lockstep.train.recipe import recipe_for_run

HALF = torch.full((3,), 0.5)

# Of the published networks, with 1,000 classes and with 10. A shortcut of a convolution where the shape changes makes
# cifar20 larger than the paper's, by 16 × 32 + 2 × 32 + 32 × 64 + 2 × 64.
PARAMETERS = {
    "resnet18": (1000, 11_689_512),
    "resnet34": (1000, 21_797_672),
    "resnet50": (1000, 25_557_032),
    "resnet101": (1000, 44_549_160),
    "cifar18": (10, 11_173_962),
    "cifar20": (10, 269_722 + 2752),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_number_of_parameters(name: str) -> None:
    classes, expected = PARAMETERS[name]
    network = ResNet(VARIANTS[name], classes, HALF, HALF)
    assert sum(parameter.numel() for parameter in network.parameters()) == expected


@pytest.mark.parametrize(
    ("variant", "image_size", "side"),
    [
        (VARIANTS["resnet50"]._replace(width=4), None, 3),
        (VARIANTS["resnet50"]._replace(width=4), 64, 2),
        (VARIANTS["cifar18"]._replace(width=4), 32, 4),
        (VARIANTS["cifar20"]._replace(width=4), 32, 8),
    ],
)
def test_how_much_of_an_image_is_left_at_the_end(variant: Variant, image_size: int | None, side: int) -> None:
    network = ResNet(variant, 7, HALF, HALF, image_size).eval()
    seen = []
    network.blocks.register_forward_hook(lambda _module, _inputs, output: seen.append(output.shape))
    with torch.no_grad():
        scores = network(torch.zeros(2, 3, 96, 96, dtype=torch.uint8))
    assert scores.shape == (2, 7)
    assert seen[0][2:] == (side, side)


def test_a_block_begins_as_its_shortcut() -> None:
    for is_deep in (False, True):
        block = ResNetBlock(8, 2 if is_deep else 8, stride=1, is_deep=is_deep)
        inputs = torch.rand(4, 8, 6, 6)
        torch.testing.assert_close(block(inputs), inputs)


def test_bytes_are_standardised_inside() -> None:
    network = ResNet(VARIANTS["cifar20"]._replace(width=2), 3, torch.tensor([0.2]), torch.tensor([0.1]))
    seen = []
    network.stem.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0]))
    network(torch.full((2, 1, 4, 4), 51, dtype=torch.uint8))
    torch.testing.assert_close(seen[0], torch.zeros(2, 1, 4, 4))


def test_the_recipe_standardises_by_its_images_and_norms_and_biases_do_not_decay() -> None:
    made, config = load_recipe("resnet", ["model.width=8"])
    recipe = recipe_for_run(config, made)  # type: ignore[arg-type]
    model = recipe.model(config)
    pixels = recipe.images.train.pixels.double() / 255  # type: ignore[attr-defined]
    torch.testing.assert_close(model.mean.flatten(), pixels.mean().float().view(1))  # type: ignore[union-attr, operator]
    torch.testing.assert_close(model.spread.flatten(), pixels.std(correction=0).float().view(1))  # type: ignore[union-attr, operator]

    optimizer = build_optimizer(model, config.optim, 64)  # type: ignore[attr-defined]
    names = {parameter: name for name, parameter in model.named_parameters()}
    decaying = {names[p] for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert {name for name, parameter in model.named_parameters() if parameter.dim() > 1} == decaying


def test_loss_and_metrics_are_sums_over_images() -> None:
    made, config = load_recipe("resnet", ["model.width=4", "label_smoothing=0.2"])
    recipe = recipe_for_run(config, made)  # type: ignore[arg-type]
    model = recipe.model(config).eval()
    pixels, labels = (tensor[:60] for tensor in recipe.data(config).test.tensors)  # type: ignore[attr-defined]
    total, count = recipe.loss(model, (pixels, labels))
    assert count == 60
    logs = model(pixels).log_softmax(1)
    expected = -(0.8 * logs[range(60), labels] + 0.2 * logs.mean(1)).sum()
    torch.testing.assert_close(total, expected)

    metrics = recipe.metrics(model, (pixels, labels))
    assert list(metrics) == ["accuracy", "top5", "loss"]
    ranks = (logs > logs[range(60), labels][:, None]).sum(1)
    assert metrics["accuracy"] == ((ranks == 0).sum(), 60)
    assert metrics["top5"] == ((ranks < 5).sum(), 60)
    torch.testing.assert_close(metrics["loss"][0], -logs[range(60), labels].sum())
    few = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 9))
    assert "top5" not in recipe.metrics(few, (pixels.float(), labels.clamp_max(8)))


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.variant: .*cifar18"):
        load_recipe("resnet", ["model.variant=resnet51"])
