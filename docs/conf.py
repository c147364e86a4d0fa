"""How the guide is built: `make docs`, then open docs/_build/html/index.html. Needs no network, to build or to read."""

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

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build", "search.md"]
nitpicky = True
# Types of Python, torch and pydantic stand in signatures; their pages are elsewhere, and the build asks no network.
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
    app.connect("source-read", _lead_links_to_pages)
    app.connect("autodoc-process-docstring", _take_stars_as_written)


def _lead_links_to_pages(_app: Sphinx, docname: str, source: list[str]) -> None:
    """A link to a file that has a page here leads to that page; in the repository it leads to the file."""
    page = HERE / f"{docname}.md"
    if page not in GENERATED:  # those were led there when they were written
        source[0] = rebased(source[0], page, page)


def _take_stars_as_written(
    _app: Sphinx, _what: str, _name: str, _it: object, _options: object, lines: list[str]
) -> None:
    """Docstrings are plain text: a star is a star, and not the beginning of emphasis."""
    lines[:] = [line.replace("*", "\\*") for line in lines]
