"""Where each rank's step goes, as a bar for each rank, cut into phases."""

from collections.abc import Sequence

from lockstep.observe.report.markup import Markup, element, join
from lockstep.observe.report.plots import legend
from lockstep.observe.timing import PHASES, RankTimes
from lockstep.observe.wording import seconds, share

_WIDTH, _LEFT, _RIGHT = 760, 66, 84
_ROW, _BAR = 26, 16


def phase_bars(ranks: Sequence[RankTimes]) -> Markup | None:
    longest = max((each.step_s for each in ranks), default=0.0)
    if longest <= 0:
        return None
    rows = [_row(each, index * _ROW, (_WIDTH - _LEFT - _RIGHT) / longest) for index, each in enumerate(ranks)]
    box = f"0 0 {_WIDTH} {len(ranks) * _ROW}"
    picture = element("svg", *rows, viewBox=box, role="img", aria_label="time of a step, by rank and phase")
    title = element("figcaption", "Time of a step, by rank")
    return element("figure", title, picture, legend(list(PHASES.values())), class_="wide")


def _row(times: RankTimes, top: int, scale: float) -> Markup:
    parts = [element("text", f"rank {times.rank}", class_="up", x=_LEFT - 8, y=top + _BAR // 2 + 4)]
    x = float(_LEFT)
    for index, (phase, words) in enumerate(PHASES.items()):
        width = times.phases[phase] * scale
        told = element(
            "title",
            f"rank {times.rank}, {words}: {seconds(times.phases[phase])}, "
            f"{share(times.phases[phase] / times.step_s if times.step_s else 0.0)} of a step",
        )
        parts.append(
            element("rect", told, class_=f"fill c{index}", x=f"{x:.1f}", y=top + 4, width=f"{width:.2f}", height=_BAR)
        )
        x += width
    parts.append(element("text", seconds(times.step_s), class_="value", x=f"{x + 8:.1f}", y=top + _BAR // 2 + 4))
    return join(*parts)
