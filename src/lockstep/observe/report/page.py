"""The report as one page: a single file that needs no network, no font, no script but its own.

Everything that comes out of a run folder is escaped, and the page's own policy forbids it to load or run anything else.
"""

import base64
import hashlib
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path

from lockstep.observe.record import Record
from lockstep.observe.report.comparison import Row
from lockstep.observe.report.contents import comparison_contents, run_contents
from lockstep.observe.report.markup import Markup, element, join
from lockstep.observe.state import State


def run_page(record: Record, state: State) -> str:
    return whole_page(f"{record.name}: lockstep report", run_contents(record, state))


def comparison_page(rows: Sequence[Row]) -> str:
    return whole_page("lockstep report: runs compared", comparison_contents(rows))


def whole_page(title: str, contents: Markup, script: str | None = None, connects: str = "'none'") -> str:
    """`script`: another file's, beside the plots' own; `connects`: to whom, as a content policy says it."""
    style, scripts = _own_file("page.css"), [_own_file("page.js")] + ([] if script is None else [script])
    allowed = " ".join(f"'sha256-{_hash(each)}'" for each in scripts)
    policy = (
        f"default-src 'none'; img-src data:; style-src 'sha256-{_hash(style)}'; script-src {allowed}; "
        f"connect-src {connects}; base-uri 'none'; form-action 'none'"
    )
    head = join(
        Markup('<meta charset="utf-8">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        element("title", title),
        element("style", Markup(style)),
    )
    body = join(element("main", contents), *(element("script", Markup(each)) for each in scripts))
    return f"<!doctype html>\n{element('html', element('head', head), element('body', body), lang='en')}\n"


def write_page(path: Path, text: str) -> None:
    """Whole or not at all; a link at that place is replaced, not followed."""
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


def _own_file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
