"""Three pictures as PNG files: a wing with its pressures, a search's way up, and downforce against drag."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.search.fronts import fronts_of

_MAIN, _FLAP, _GROUND, _FAINT = "#1f4e79", "#c8511b", "#8a8a8a", "#b8b8b8"


def draw_wing(points: Tensor, pressures: Tensor, title: str, path: Path) -> None:
    """`points` (2 elements, points, 2) in metres over the ground, `pressures` (2, points) as coefficients."""
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
    """Of designs that were evaluated, the generation and the fitness; NaN where that failed, of not all of them."""
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
    """In newtons, of the designs that were evaluated; those that break rules are shown, but are in no front."""
    rows = front_rows(downforce, drag, is_legal)
    legal, other, front = (torch.stack([drag[which], downforce[which]]) for which in (is_legal, ~is_legal, rows))
    with _figure(path, 1, (8.0, 5.5)) as (axes,):
        axes.scatter(*other.tolist(), s=5, color=_FAINT, alpha=0.5, linewidths=0, label="breaks rules or limits")
        axes.scatter(*legal.tolist(), s=7, color=_MAIN, alpha=0.5, linewidths=0, label="within rules and limits")
        axes.step(*front.tolist(), where="post", color=_FLAP, linewidth=1.2, zorder=3)
        axes.scatter(*front.tolist(), s=16, color=_FLAP, zorder=3, label="front: no other has more for less")
        axes.set_xlim(0, 1.05 * drag.quantile(0.99).item())  # a few stalled ones are far off
        axes.set_xlabel("drag [N]")
        axes.set_ylabel("downforce [N]")
        axes.legend(frameon=False, loc="lower right")


def require_matplotlib() -> None:
    """To be asked before a search, not after it."""
    if find_spec("matplotlib") is None:
        raise UserError("the wing's pictures need matplotlib: pip install 'lockstep-train[wing]', or wing.pictures=no")


def front_rows(downforce: Tensor, drag: Tensor, is_legal: Tensor) -> Tensor:
    """The legal designs than which no other legal one has more downforce for less drag, by their drag."""
    legal = is_legal.nonzero().squeeze(1)
    rows = legal[fronts_of(torch.stack([drag[legal], -downforce[legal]], dim=1)) == 0]
    return rows[drag[rows].argsort(stable=True)]


@contextmanager
def _figure(path: Path, rows: int, size: tuple[float, float], **options: Any) -> Iterator[tuple[Any, ...]]:
    """Axes to draw into, one under the other; the file is written at the end."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # no display, and none of matplotlib's global state
    axes = figure.subplots(rows, 1, squeeze=False, **options)[:, 0]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    yield tuple(axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
