"""Pages that are generated when the guide is built: copies of other files of the repository, and the commands' help."""

import os
import re
from pathlib import Path
from typing import Any

import typer

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
FRONT = DOCS / "index.md"  # links to the README lead here

_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)")  # the target of [text](target) without its #anchor


def _pages_by_file() -> dict[Path, Path]:
    """Map files of the repository to their pages in the guide, including the README of every recipe."""
    pages = {
        ROOT / "README.md": FRONT,
        ROOT / "CHANGELOG.md": DOCS / "changelog.md",
        ROOT / "CONTRIBUTING.md": DOCS / "contributing.md",
        ROOT / "SECURITY.md": DOCS / "security.md",
        ROOT / "bench" / "RESULTS.md": DOCS / "measurements.md",
        DOCS / "search.md": DOCS / "evolution.md",  # search.html is Sphinx's full-text search
    }
    for readme in sorted(ROOT.glob("src/lockstep/recipes/*/README.md")):
        pages[readme] = DOCS / "recipes" / f"{readme.parent.name}.md"
    return pages


PAGES = _pages_by_file()
COMMANDS = DOCS / "reference" / "commands.md"
SETTINGS = DOCS / "reference" / "settings.md"
GENERATED = {*PAGES.values(), COMMANDS, SETTINGS} - {FRONT}


def write_generated_pages() -> None:
    """Write all generated pages; `conf.py` calls this before a build."""
    from settings import settings_page

    from lockstep.cli import app

    for origin, page in PAGES.items():
        if page != FRONT:
            _write(page, rebased(origin.read_text(), origin, page))
    _write(COMMANDS, command_reference(typer.main.get_command(app)))
    _write(SETTINGS, settings_page())


def rebased(text: str, origin: Path, page: Path) -> str:
    """Return the text of `origin` with its relative links adapted to `page`; a file that has a page is linked there."""

    def adapt(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(origin.parent / link[1]))
        if not target.exists():
            return link[1]
        return os.path.relpath(PAGES.get(target, target), page.parent)

    return _LINK.sub(adapt, text)


def command_reference(command: Any) -> str:
    """Return a page with the help text of every command."""
    sections = ["# Commands", "The output of `lockstep COMMAND --help`. This page is generated from the commands."]
    sections += [
        f"## {path}\n\n```text\n{_help(path, each)}\n```" for path, each in leaf_commands(command, "lockstep").items()
    ]
    return "\n\n".join(sections) + "\n"


def leaf_commands(command: Any, path: str) -> dict[str, Any]:
    """Return the commands without subcommands, by what you type. (Their class depends on the version of typer.)"""
    children = getattr(command, "commands", None)
    if children is None:
        return {path: command}
    found: dict[str, Any] = {}
    for name, child in children.items():
        found |= leaf_commands(child, f"{path} {name}")
    return found


def _help(path: str, command: Any) -> str:
    context = command.context_class(command, info_name=path, max_content_width=100, terminal_width=100)
    return str(command.get_help(context)).strip()


def _write(path: Path, text: str) -> None:
    """Write only if the text has changed, so that Sphinx does not rebuild unchanged pages."""
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
