"""Pictures of a finished search as PNG files: the best wing, the fitness over generations, downforce and drag."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.recipes.wing.fitness import Assessor
from lockstep.recipes.wing.panels import pressure
from lockstep.search.design_archive import DesignArchive
from lockstep.search.pareto import nondominated_fronts

_MAIN, _FLAP, _GROUND, _FAINT = "#1f4e79", "#c8511b", "#8a8a8a", "#b8b8b8"


def draw_wing(points: Tensor, pressures: Tensor, title: str, path: Path) -> None:
    """Draw a wing; `points` (2 elements, points, 2) in metres, `pressures` (2, points) as coefficients."""
    with _figure(path, 2, (8.0, 7.5), sharex=True, height_ratios=[3, 2]) as (upper, lower):
        nose = points.shape[1] // 2
        millimetres = (points - points.new_tensor([points[..., 0].min().item(), 0.0])) * 1000
        for name, colour, outline, pressure in zip(
            ("main", "flap"), (_MAIN, _FLAP), millimetres, pressures, strict=True
        ):
            x, y = outline.T.tolist()
            suction, press = pressure[: nose + 1].tolist(), pressure[nose:].tolist()
            upper.plot(x[: nose + 1], suction, color=colour, label=f"{name}, underside")
            upper.plot(x[nose:], press, color=colour, linestyle="--", label=f"{name}, upper side")
            lower.fill(x, y, color=colour, alpha=0.85, linewidth=0)
        upper.axhline(0, color=_FAINT, linewidth=0.8, zorder=0)
        upper.set_title(title, fontsize=11)
        upper.set_ylabel("pressure coefficient")
        upper.legend(frameon=False, fontsize=9)
        lower.axhline(0, color=_GROUND, linewidth=2)
        lower.axhspan(-15, 0, color=_GROUND, alpha=0.25, linewidth=0)
        lower.annotate("ground", (0, -5), fontsize=8, color="#555555", va="top")
        lower.set_aspect("equal", adjustable="datalim")
        lower.set_xlabel("along the car [mm]; the air comes from the left")
        lower.set_ylabel("above the ground [mm]")


def draw_history(generations: Tensor, fitness: Tensor, path: Path) -> None:
    """Draw best and median fitness by generation; NaN marks failed designs. At least one must not have failed."""
    numbers = sorted(set(generations.tolist()))
    of_each = [fitness[(generations == number) & fitness.isfinite()] for number in numbers]
    found = [(number, values) for number, values in zip(numbers, of_each, strict=True) if len(values)]
    best = torch.stack([values.max() for _, values in found])
    at = [number for number, _ in found]
    with _figure(path, 1, (8.0, 4.5)) as (axes,):
        axes.step(at, best.cummax(0).values.tolist(), where="post", color=_MAIN, label="best so far")
        axes.plot(at, best.tolist(), ".", color=_MAIN, markersize=4, label="best of the generation")
        axes.plot(at, [values.median().item() for _, values in found], color=_FLAP, label="median of the generation")
        axes.set_xlabel("generation")
        axes.set_ylabel("fitness")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(frameon=False)


def draw_front(downforce: Tensor, drag: Tensor, is_legal: Tensor, path: Path) -> None:
    """Draw downforce against drag in newtons, with the Pareto front of the legal designs."""
    rows = front_rows(downforce, drag, is_legal)
    legal, other, front = (torch.stack([drag[which], downforce[which]]) for which in (is_legal, ~is_legal, rows))
    with _figure(path, 1, (8.0, 5.5)) as (axes,):
        axes.scatter(*other.tolist(), s=5, color=_FAINT, alpha=0.5, linewidths=0, label="breaks rules or limits")
        axes.scatter(*legal.tolist(), s=7, color=_MAIN, alpha=0.5, linewidths=0, label="within rules and limits")
        axes.step(*front.tolist(), where="post", color=_FLAP, linewidth=1.2, zorder=3)
        axes.scatter(*front.tolist(), s=16, color=_FLAP, zorder=3, label="Pareto front")
        axes.set_xlim(0, 1.05 * drag.quantile(0.99).item())  # a few stalled designs lie far outside
        axes.set_xlabel("drag [N]")
        axes.set_ylabel("downforce [N]")
        axes.legend(frameon=False, loc="lower right")


def require_matplotlib() -> None:
    """Raise a user error if matplotlib is missing; call this before a search."""
    if find_spec("matplotlib") is None:
        raise UserError("the wing's pictures need matplotlib: pip install 'lockstep-train[wing]', or wing.pictures=no")


def front_rows(downforce: Tensor, drag: Tensor, is_legal: Tensor) -> Tensor:
    """Return the rows of the Pareto front of legal designs, sorted by drag."""
    legal = is_legal.nonzero().squeeze(1)
    rows = legal[nondominated_fronts(torch.stack([drag[legal], -downforce[legal]], dim=1)) == 0]
    return rows[drag[rows].argsort(stable=True)]


@contextmanager
def _figure(path: Path, rows: int, size: tuple[float, float], **options: Any) -> Iterator[tuple[Any, ...]]:
    """Yield axes, one below the other, and write the figure to the file at the end."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # without a display or matplotlib's global state
    axes = figure.subplots(rows, 1, squeeze=False, **options)[:, 0]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    yield tuple(axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


_MAX_DESIGNS = 4000  # assessed again for the pictures, which takes a few seconds
_BATCH = 64


def draw_pictures(folder: Path, archive: DesignArchive, assessor: Assessor) -> None:
    """Write best-wing.png, fitness.png and front.png, if any wing was evaluated."""
    good = archive.is_good.nonzero().squeeze(1)
    if not len(good):
        return
    chosen = good[torch.linspace(0, len(good) - 1, min(len(good), _MAX_DESIGNS)).round().long()]
    if archive.costs.shape[1] == 1:  # always include the best
        chosen = torch.cat([chosen, archive.costs[:, 0].argmin().unsqueeze(0)])
    table = torch.cat([_row(assessor, designs) for designs in torch.split(archive.designs[chosen], _BATCH)])
    fitness, downforce, drag, is_legal = table.unbind(1)
    best = fitness.argmax()
    draw_best(folder / "best-wing.png", archive.designs[chosen[best]], assessor)
    draw_history(archive.generations[chosen], fitness, folder / "fitness.png")
    draw_front(downforce, drag, is_legal > 0, folder / "front.png")


def draw_best(path: Path, design: Tensor, assessor: Assessor) -> None:
    """Draw a design with its pressures and forces."""
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
