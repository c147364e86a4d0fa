"""What an event has to show, whoever shows it: numbers, images and text by name."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.events.event import Event

_ENVELOPE = ("t", "attempt", "step", "kind")
_GROUPS = {"step": "train", "eval": "eval"}  # kinds whose numbers make curves; the others are told in words
_NON_FINITE = ("nan", "inf", "-inf")  # how an event spells them


class Shown(NamedTuple):
    step: int
    t: float
    scalars: dict[str, float]
    images: dict[str, Path]
    texts: dict[str, str]


def shown(event: Event, folder: Path) -> Shown:
    """`train/loss`, `eval/accuracy`, `images/NAME`, `texts/NAME`, `run/checkpoint` …; `folder` is the run's."""
    kind, fields = event["kind"], facts(event)
    images, texts = fields.pop("images", {}), fields.pop("texts", {})
    group = _GROUPS.get(kind)
    if group == "eval":
        fields |= fields.pop("metrics", {})
    return Shown(
        event["step"],
        event["t"],
        dict(_numbers(fields, group)) if group else {},
        {f"images/{name}": folder / path for name, path in images.items()},
        {f"texts/{name}": text for name, text in texts.items()}
        | ({} if group else {f"run/{kind}": "\n".join(_lines(fields))}),
    )


def facts(event: Event) -> dict[str, Any]:
    """An event without its envelope."""
    return {name: value for name, value in event.items() if name not in _ENVELOPE}


def _numbers(fields: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """The numbers inside, by their path. Lists make no curve."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}/{name}")
        elif isinstance(value, int | float) or value in _NON_FINITE:
            yield f"{prefix}/{name}", float(value)


def _lines(fields: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _lines(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}: {value}"
