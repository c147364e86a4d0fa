"""HTML and SVG in which a stranger's text stays text: whatever is not markup made here is escaped."""

import html
from typing import Any

_WITHOUT_END = ("img",)


class Markup(str):
    """Text that is HTML or SVG already."""

    __slots__ = ()


def element(name: str, *children: "str | Markup | None", **attributes: Any) -> Markup:
    """`element("a", "x < y", class_="b")` → `<a class="b">x &lt; y</a>`; an attribute of None is left out."""
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{shown}>" if name in _WITHOUT_END else f"<{name}{shown}>{join(*children)}</{name}>")


def join(*children: "str | Markup | None") -> Markup:
    return Markup("".join(child if isinstance(child, Markup) else html.escape(child) for child in children if child))
