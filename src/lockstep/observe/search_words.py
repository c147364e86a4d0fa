"""A search's events in words: where its generations stand, and the best design so far."""

from collections.abc import Mapping
from typing import Any

from lockstep.events.event import Event

_GENES_A_LINE = 6


def start(event: Event) -> str:
    objectives = ", ".join(f"{name} ({direction})" for name, direction in event["objectives"].items())
    steered = "steered by a network" if event["guided"] else "evolution alone"
    return (
        f"{event.get('recipe', 'search')}: {event['genes']} genes, {event['population']} designs a generation, "
        f"{event['total_rounds']} generations, {steered}; {objectives} → {event.get('folder')}"
    )


def generation(event: Event) -> list[str]:
    """One line, and the best design where it is a new one."""
    parts = [f"generation {event['step']:>4}"]
    parts.append("no design yet" if event["found"] is None else f"best {values(event['found'])}")
    if event["front"] is not None:
        parts.append(f"front of {event['front']}")
    if event["median"] is not None:
        parts.append(f"median {values(event['median'])}")
    failed = f" ({event['failed']} failed)" if event["failed"] else ""
    parts.append(f"{event['evaluated']} evaluated{failed} in {event['evaluate_s']:.2f} s")
    lines = ["  ".join(parts)]
    lines += [f"    failed: {reason} (×{count})" for reason, count in event["reasons"].items()]
    return lines + ([] if event["design"] is None else design(event["design"]))


def design(genes: Mapping[str, Any]) -> list[str]:
    told = [f"{name} {_shown(value)}" for name, value in genes.items()]
    rows = [told[start : start + _GENES_A_LINE] for start in range(0, len(told), _GENES_A_LINE)]
    return [f"    {', '.join(row)}" for row in rows]


def end(event: Event) -> list[str]:
    best = "every evaluation failed" if event["metrics"] is None else f"best {values(event['metrics'])}"
    failed = f" ({event['failures']} failed)" if event["failures"] else ""
    return [
        f"done after {event['step']} generations, {event['evaluations']} evaluations{failed}: {event['ended']}",
        f"{best}  → {event['folder']}",
        *([] if event["design"] is None else design(event["design"])),
    ]


def values(numbers: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_shown(value)}" for name, value in numbers.items())


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
