"""Sphinx settings of the guide: run `make docs`, then open docs/_build/html/index.html. No network is needed."""

import inspect
import sys
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

from pages import GENERATED, rebased, write_generated_pages  # noqa: E402

import lockstep  # noqa: E402

project = "lockstep"
author = "the lockstep developers"
copyright = f"2026, {author}"
version = release = lockstep.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "search.md"]
nitpicky = True
# Signatures name types of Python, torch and pydantic; their pages are elsewhere, and the build uses no network.
nitpick_ignore_regex = [("py:.*", ".*")]

myst_heading_anchors = 4
myst_links_external_new_tab = False

default_role = "literal"  # docstrings write `name` as Markdown does
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_display_short_literal_types = True

html_theme = "furo"
html_title = f"lockstep {version}"
html_copy_source = False
html_show_sourcelink = False
html_static_path: list[str] = []


def setup(app: Sphinx) -> None:
    write_generated_pages()
    app.connect("source-read", _link_to_pages)
    app.connect("autodoc-process-docstring", _mark_up, priority=400)  # before napoleon, which reads sections as `Args:`
    app.connect("autodoc-process-docstring", _undo_napoleon, priority=600)


def _link_to_pages(_app: Sphinx, docname: str, source: list[str]) -> None:
    """Point links to files that have a page in the guide to those pages; in the repository they lead to the files."""
    page = HERE / f"{docname}.md"
    if page not in GENERATED:  # their links were rewritten when they were written
        source[0] = rebased(source[0], page, page)


def _mark_up(_app: Sphinx, _what: str, _name: str, _it: object, _options: object, lines: list[str]) -> None:
    """Turn a docstring's plain text into reStructuredText: stars are literal, and indented examples are code."""
    lines[:] = _as_markup(lines)


def _undo_napoleon(_app: Sphinx, what: str, _name: str, it: object, _options: object, lines: list[str]) -> None:
    """Napoleon takes the words before a colon in a property's docstring for its type: show the sentence instead."""
    if what == "property":
        lines[:] = _as_markup((inspect.getdoc(it) or "").split("\n"))


def _as_markup(lines: list[str]) -> list[str]:
    marked: list[str] = []
    code_indent = None  # of the line that introduces the code that we are in
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if code_indent is not None and (not line or indent > code_indent):
            marked.append(line)
        elif _introduces_code(lines, number):
            code_indent = indent
            marked += [line.replace("*", "\\*") + ":", ""]
        else:
            code_indent = None
            marked.append(line.replace("*", "\\*"))
    return marked


def _introduces_code(lines: list[str], number: int) -> bool:
    """`Example:`, or a line that ends with a colon and has an indented block after a blank line."""
    line, following = lines[number], lines[number + 1 : number + 3]
    if line.strip() in ("Example:", "Examples:"):
        return True
    depth = len(line) - len(line.lstrip())
    if not line.endswith(":") or len(following) < 2 or following[0]:
        return False
    return len(following[1]) - len(following[1].lstrip()) >= depth + 4
