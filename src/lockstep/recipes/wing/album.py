"""From what a search has evaluated to its pictures."""

from pathlib import Path

import torch
from torch import Tensor

from lockstep.recipes.wing.fitness import Assessor
from lockstep.recipes.wing.panels import pressure
from lockstep.recipes.wing.pictures import draw_front, draw_history, draw_wing
from lockstep.search.archive import Archive

_MOST = 4000  # designs that are assessed once more for a picture: a few seconds
_BATCH = 64


def draw_all(folder: Path, archive: Archive, assessor: Assessor) -> None:
    """best-wing.png, fitness.png and front.png, if any wing could be evaluated. Of a long search, an even choice."""
    good = archive.is_good.nonzero().squeeze(1)
    if not len(good):
        return
    chosen = good[torch.linspace(0, len(good) - 1, min(len(good), _MOST)).round().long()]
    if archive.costs.shape[1] == 1:  # the best is never left out
        chosen = torch.cat([chosen, archive.costs[:, 0].argmin().unsqueeze(0)])
    table = torch.cat([_row(assessor, designs) for designs in torch.split(archive.designs[chosen], _BATCH)])
    fitness, downforce, drag, is_legal = table.unbind(1)
    best = fitness.argmax()
    draw_best(folder / "best-wing.png", archive.designs[chosen[best]], assessor)
    draw_history(archive.generations[chosen], fitness, folder / "fitness.png")
    draw_front(downforce, drag, is_legal > 0, folder / "front.png")


def draw_best(path: Path, design: Tensor, assessor: Assessor) -> None:
    found = assessor.assess(design.unsqueeze(0))
    loads, speed = found.loads, assessor.air.speed
    title = (
        f"downforce {loads.downforce.item():.0f} N, drag {loads.drag.item():.0f} N at {speed:g} m/s; "
        f"tips bend {1000 * found.strain.deflection_m.item():.1f} mm; fitness {found.fitness.item():.3f}"
    )
    draw_wing(found.shape.points[0], pressure(loads.speeds, loads.wash)[0], title, path)


def _row(assessor: Assessor, designs: Tensor) -> Tensor:
    found = assessor.assess(designs)
    return torch.stack([found.fitness, found.loads.downforce, found.loads.drag, found.is_legal.double()], dim=1)
