"""Config values with the file and line they come from, and how messages show them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"
KeyPath: TypeAlias = tuple[str | int, ...]  # keys of mappings and indices of lists, outermost first

MAX_SHOWN = 60  # characters of anything quoted in a message


@dataclass(frozen=True, slots=True)
class LocatedValue:
    """A value as written in a config; inside lists and mappings every element has its own origin."""

    content: "bool | int | float | str | list[LocatedValue] | dict[str, LocatedValue] | None"
    origin: str  # `run.yaml:3` or `command line`

    def plain(self) -> Plain:
        """The value without its origins."""
        if isinstance(self.content, dict):
            return {key: value.plain() for key, value in self.content.items()}
        if isinstance(self.content, list):
            return [value.plain() for value in self.content]
        return self.content

    def child(self, step: str | int) -> "LocatedValue | None":
        """The element at a mapping's key or a list's index; None if there is none."""
        if isinstance(self.content, dict) and isinstance(step, str):
            return self.content.get(step)
        if isinstance(self.content, list) and isinstance(step, int) and step < len(self.content):
            return self.content[step]
        return None

    def nearest(self, path: KeyPath) -> "LocatedValue":
        """The value at `path` or, if nothing was written there, the innermost value that encloses it."""
        value = self
        for step in path:
            child = value.child(step)
            if child is None:
                break
            value = child
        return value

    def leaves(self, path: KeyPath = ()) -> Iterator[tuple[KeyPath, "LocatedValue"]]:
        """Every scalar inside, with its path."""
        if isinstance(self.content, dict):
            for key, value in self.content.items():
                yield from value.leaves((*path, key))
        elif isinstance(self.content, list):
            for index, value in enumerate(self.content):
                yield from value.leaves((*path, index))
        else:
            yield path, self

    def has_value_at(self, path: KeyPath) -> bool:
        """Is something other than null written at `path`?"""
        if not path:
            return self.content is not None
        child = self.child(path[0])
        return child is not None and child.has_value_at(path[1:])

    def without(self, path: KeyPath) -> "LocatedValue":
        """A copy without the value at `path`."""
        if not isinstance(self.content, dict) or path[0] not in self.content:
            return self
        rest = {key: value for key, value in self.content.items() if key != path[0]}
        if len(path) > 1:
            rest = {**self.content, path[0]: self.content[path[0]].without(path[1:])}
        return LocatedValue(rest, self.origin)

    def merge(self, later: "LocatedValue") -> "LocatedValue":
        """Lay `later` over this: mappings are merged key by key, anything else is replaced."""
        if not (isinstance(self.content, dict) and isinstance(later.content, dict)):
            return later
        merged = dict(self.content)
        for key, value in later.content.items():
            merged[key] = merged[key].merge(value) if key in merged else value
        return LocatedValue(merged, later.origin)


def dotted(path: KeyPath) -> str:
    """A path as people write it: `("optim", "betas", 0)` is `optim.betas[0]`."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += ("." if text else "") + shortened(printable(step))
    return text


def show_value(value: Plain) -> str:
    """A value as YAML spells it, on one line and short."""
    return shortened(_spelled(value))


def printable(text: str) -> str:
    """The text on one line, with control characters escaped so that they cannot move a terminal's cursor."""
    return text if text.isprintable() else repr(text)[1:-1]


def shortened(text: str) -> str:
    """The text, cut to MAX_SHOWN characters."""
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def _spelled(value: Plain) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(map(_spelled, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{printable(key)}: {_spelled(item)}" for key, item in value.items()) + "}"
    if isinstance(value, float):
        return repr(value).replace("inf", ".inf").replace("nan", ".nan")
    return repr(value)
