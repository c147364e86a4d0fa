"""What is wrong with a config, one line for each fault: where it was written, the key, what was expected and found."""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import get_args

from pydantic_core import ErrorDetails, core_schema

from lockstep.config.outline import Outline
from lockstep.config.private import references
from lockstep.config.value import KeyPath, Value, dotted, printable, shown

ONLY_PRIVATE = "would be written to the run folder; only private fields may refer to the environment"

# The kinds of error that the outline's words describe, beside all those that end in `_type` and `_parsing`.
_OUTLINED = {
    "enum",
    "literal_error",
    "greater_than",
    "greater_than_equal",
    "less_than",
    "less_than_equal",
    "int_from_float",
    "whole_number",
}
_PYDANTIC = frozenset(get_args(core_schema.ErrorType))  # the rest were raised by a schema, with words of its own


def problems(errors: Sequence[ErrorDetails], root: Value, outline: Outline) -> list[str]:
    """One line for each key at fault, from pydantic's errors and from references where none may be."""
    lines: dict[KeyPath, str] = {}
    for error in errors:
        path = _path(error["loc"], root, outline)
        # Every branch of a union complains on its own; the outline's words cover all of them at once.
        lines.setdefault(path, _line(error, path, root, outline))
    for path, names in _misplaced_references(root, outline):
        lines.setdefault(path, located(root, path, f"${{{names[0]}}} {ONLY_PRIVATE}"))
    return list(lines.values())


def located(root: Value, path: KeyPath, problem: str) -> str:
    label = f"{dotted(path)}: " if path else ""
    return f"{root.nearest(path).origin}: {label}{problem}"


def _path(location: tuple[str | int, ...], root: Value, outline: Outline) -> KeyPath:
    """The key an error is about: pydantic's location without the names of union branches that it mixes in."""
    path: KeyPath = ()
    for step in location:
        written = root.nearest(path)
        if written.child(step) is not None or step in outline.names(path):
            path = (*path, step)
    return path


def _line(error: ErrorDetails, path: KeyPath, root: Value, outline: Outline) -> str:
    kind = error["type"]
    if kind == "missing":
        expected = outline.expected(path)
        return f"{root.origin}: {dotted(path)}: missing" + (f"; expected {expected}" if expected else "")
    if kind == "extra_forbidden":
        return located(root, path, "unknown key" + _nearest_key(path, outline))
    if kind in ("value_error", "assertion_error"):
        return located(root, path, _one_line(str(error["ctx"]["error"])))
    expected = outline.expected(path)
    if expected and (kind in _OUTLINED or kind.endswith(("_type", "_parsing"))):
        return located(root, path, f"expected {expected}{_got(path, root, outline)}")
    words = _one_line(error["msg"].replace("Input should be", "expected"))
    return located(root, path, words + (_got(path, root, outline) if kind in _PYDANTIC else ""))


def _got(path: KeyPath, root: Value, outline: Outline) -> str:
    """The value at fault, unless it is private or may have private parts."""
    value = root.nearest(path).plain()
    if outline.is_private(path):
        return ", got something else"
    if isinstance(value, dict):
        return ", got a mapping"
    if isinstance(value, list):
        return ", got a list"
    choices = outline.choices(path)
    near = get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    return f", got {shown(value)}" + (f"; did you mean {near[0]}?" if near else "")


def _nearest_key(path: KeyPath, outline: Outline) -> str:
    *around, key = path
    known = [dotted(each) for each in outline.paths()]
    if not around and key in known:
        outer, _, inner = str(key).rpartition(".")
        return f"; a dot does not nest in a file: write {inner} under {outer}"
    siblings = get_close_matches(str(key), outline.names(tuple(around)), n=1)
    if siblings:
        return f"; did you mean {dotted((*around, siblings[0]))}?"
    elsewhere = {name.rpartition(".")[2]: name for name in reversed(known)}  # reversed: the outermost of equals wins
    alike = get_close_matches(str(key), list(elsewhere), n=1)
    return f"; did you mean {elsewhere[alike[0]]}?" if alike else ""


def _misplaced_references(root: Value, outline: Outline) -> Iterator[tuple[KeyPath, list[str]]]:
    for path, value in root.leaves():
        names = references(value.content) if isinstance(value.content, str) else []
        if names and not outline.is_private(path):
            yield path, names


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))
