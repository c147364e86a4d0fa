"""Writing: byte after byte, each drawn from what the model expects after those before it."""

import torch
from torch import Generator

from lockstep.recipes.gpt.transformer import Gpt

_FIRST = ord("\n")  # as if a line had just ended


@torch.no_grad()
def write(model: Gpt, num_bytes: int, temperature: float, generator: Generator) -> str:
    """So many bytes as text; a low temperature keeps to the likely."""
    device = model.bytes.weight.device
    written = [_FIRST]
    was_training = model.training
    model.eval()
    try:
        for _ in range(num_bytes):
            context = torch.tensor([written[-model.length :]], device=device)
            scores = model(context)[0, -1].float().cpu()
            chances = torch.softmax(scores / temperature, dim=0)
            written.append(int(torch.multinomial(chances, 1, generator=generator)))
    finally:
        model.train(was_training)
    return _shown(bytes(written[1:]))


def _shown(data: bytes) -> str:
    """What is no UTF-8 becomes �, and so do control characters: a terminal would obey them."""
    text = data.decode(errors="replace")
    return "".join(character if character.isprintable() or character in "\n\t" else "�" for character in text)
