"""Pages that are made at build time: files from elsewhere in the repository, and what the commands say of them."""

import os
import re
from pathlib import Path
from typing import Any

import typer

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
FRONT = DOCS / "index.md"  # the guide's own, which stands for the README

_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)")  # the target of [text](target) without its #anchor


def _elsewhere() -> dict[Path, Path]:
    """From a file of the repository to its page; the recipes' READMEs are found, so that a new one has its page."""
    pages = {
        ROOT / "README.md": FRONT,
        ROOT / "CHANGELOG.md": DOCS / "changelog.md",
        ROOT / "CONTRIBUTING.md": DOCS / "contributing.md",
        ROOT / "bench" / "RESULTS.md": DOCS / "measurements.md",
        DOCS / "search.md": DOCS / "evolution.md",  # search.html is Sphinx's own, for words
    }
    for readme in sorted(ROOT.glob("src/lockstep/recipes/*/README.md")):
        pages[readme] = DOCS / "recipes" / f"{readme.parent.name}.md"
    return pages


PAGES = _elsewhere()
COMMANDS = DOCS / "reference" / "commands.md"
SETTINGS = DOCS / "reference" / "settings.md"
GENERATED = {*PAGES.values(), COMMANDS, SETTINGS} - {FRONT}


def write_generated_pages() -> None:
    from settings import settings_page

    from lockstep.cli import app

    for origin, page in PAGES.items():
        if page != FRONT:
            _write(page, rebased(origin.read_text(), origin, page))
    _write(COMMANDS, command_reference(typer.main.get_command(app)))
    _write(SETTINGS, settings_page())


def rebased(text: str, origin: Path, page: Path) -> str:
    """A file's text with its relative links as they must be on a page: to pages where there are some, else to files."""

    def lead(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(origin.parent / link[1]))
        if not target.exists():
            return link[1]
        return os.path.relpath(PAGES.get(target, target), page.parent)

    return _LINK.sub(lead, text)


def command_reference(command: Any) -> str:
    """Every command's own help, word for word."""
    sections = ["# Commands", "What `lockstep COMMAND --help` says. This page is made from the commands themselves."]
    sections += [
        f"## {path}\n\n```text\n{_help(path, each)}\n```" for path, each in leaf_commands(command, "lockstep").items()
    ]
    return "\n\n".join(sections) + "\n"


def leaf_commands(command: Any, path: str) -> dict[str, Any]:
    """Commands that do something, by the words that one types. (Their class is click's or, by now, typer's own.)"""
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
    """Only where it has changed: an unchanged page is not built again."""
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
