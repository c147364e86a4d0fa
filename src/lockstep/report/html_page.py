"""Build an HTML page as one self-contained file, in which text from a run folder stays text.

Anything that is not `Markup` made here is escaped. The page's content policy forbids loading or running anything else.
"""

import base64
import hashlib
import html
import os
import tempfile
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

from lockstep.terminal_text import escape_controls

_VOID_ELEMENTS = ("img",)  # elements without an end tag


class Markup(str):
    """Text that is already HTML or SVG."""

    __slots__ = ()


def element(name: str, *children: "str | Markup | None", **attributes: Any) -> Markup:
    """Return `<a class="b">x &lt; y</a>` for `element("a", "x < y", class_="b")`; attributes of None are omitted."""
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{shown}>" if name in _VOID_ELEMENTS else f"<{name}{shown}>{join_markup(*children)}</{name}>")


def join_markup(*children: "str | Markup | None") -> Markup:
    """Join markup and text; text is escaped, None is omitted."""
    return Markup("".join(child if isinstance(child, Markup) else _escape(child) for child in children if child))


def render_page(title: str, contents: Markup, script: str | None = None, connect_src: str = "'none'") -> str:
    """Return a whole page with its style, its scripts and its content policy.

    Args:
        title: shown by the browser.
        contents: what goes into the page's main element.
        script: another script, besides that of the plots.
        connect_src: which servers the scripts may connect to, as in a content policy.
    """
    style = _read_asset("page.css")
    scripts = [_read_asset("page.js")] + ([] if script is None else [script])
    allowed = " ".join(f"'sha256-{_hash(each)}'" for each in scripts)
    policy = (
        f"default-src 'none'; img-src data:; style-src 'sha256-{_hash(style)}'; script-src {allowed}; "
        f"connect-src {connect_src}; base-uri 'none'; form-action 'none'"
    )
    head = join_markup(
        Markup('<meta charset="utf-8">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        element("title", title),
        element("style", Markup(style)),
    )
    body = join_markup(element("main", contents), *(element("script", Markup(each)) for each in scripts))
    return f"<!doctype html>\n{element('html', element('head', head), element('body', body), lang='en')}\n"


def write_page(path: Path, text: str) -> None:
    """Write a page atomically. A symbolic link at `path` is replaced, not followed."""
    descriptor, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123 (a descriptor has no path)
            file.write(text)
            os.fchmod(descriptor, 0o644)
        Path(draft).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(draft).unlink()
        raise


def _escape(text: str) -> str:
    """Return a text for HTML: a browser obeys marks that reverse text, and no file can hold half a surrogate pair."""
    return html.escape(escape_controls(text))


def _read_asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
