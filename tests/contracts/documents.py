"""The documents of this repository as their readers see them: links, headings, code blocks, commands."""

import re
import runpy
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import typer

from lockstep.cli import app

ROOT = Path(__file__).parents[2]
_GENERATED = runpy.run_path(str(ROOT / "docs" / "pages.py"))["GENERATED"]  # their originals are checked instead
GUIDE = sorted({path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts} - _GENERATED)
DOCUMENTS = [
    *GUIDE,
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    ROOT / "bench" / "RESULTS.md",
    *sorted(ROOT.glob("src/lockstep/recipes/*/README.md")),
]

_FENCE = re.compile(r"^```(.*?)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")
_COMMAND = re.compile(r"^(?:\$ )?(lockstep .*)$", re.MULTILINE)


class Block(NamedTuple):
    language: str
    text: str
    line: int


class Link(NamedTuple):
    target: str
    line: int


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def blocks_of(path: Path) -> list[Block]:
    text = path.read_text()
    return [Block(found[1].strip(), found[2], _line(text, found.start())) for found in _FENCE.finditer(text)]


def links_of(path: Path) -> list[Link]:
    """Return the relative links, including pictures but not those in code blocks."""
    text = _FENCE.sub(lambda block: "\n" * block[0].count("\n"), path.read_text())
    links = [Link(found[2], _line(text, found.start())) for found in _LINK.finditer(text)]
    return [link for link in links if not re.match("https?:|mailto:", link.target)]


@cache
def anchors_of(path: Path) -> set[str]:
    """Return the anchors of the headings, as GitHub and the guide name them."""
    text = _FENCE.sub("", path.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def named_file(block: Block) -> str | None:
    """Return the name of the file that a block shows as a whole: its first line names it."""
    found = re.match(r"# (\w+\.(?:py|yaml))\n", block.text)
    return found[1] if found else None


def is_complete(block: Block) -> bool:
    """Whether the block is a script that runs unchanged."""
    return block.text.startswith("import ") or '__name__ == "__main__"' in block.text


def commands_of(path: Path) -> Iterator[tuple[int, str]]:
    """Return the lines of `lockstep …` in code blocks without a language, and in `code` in the text."""
    for block in blocks_of(path):
        if block.language in ("", "bash", "console"):
            for found in _COMMAND.finditer(block.text.replace("\\\n", " ")):  # a line may be continued
                yield block.line + _line(block.text, found.start()), found[1]
    text = _FENCE.sub(lambda block: "\n" * block[0].count("\n"), path.read_text())
    for found in re.finditer(r"`(lockstep [^`]+)`", text):
        yield _line(text, found.start()), found[1]


def fault_of(command: str) -> str | None:
    """Return why the command line would refuse a command, without running it."""
    is_synopsis = bool(re.search(r"[\[\]|…]|\b[A-Z]{3,}\b", command))
    words = shlex.split(re.split(r"\s{6,}|\s{2,}#", command)[0])[1:]  # what follows several spaces is a remark
    known: Any = typer.main.get_command(app)
    while words and hasattr(known, "commands") and not words[0].startswith("-"):
        name = words.pop(0)
        if name not in known.commands:
            return None if is_synopsis and name.isupper() else f"there is no command {name}"
        known = known.commands[name]
    if "--" in words and known.name in ("slurm", "kubernetes"):  # another command follows
        inner = words.index("--")
        if fault := fault_of(shlex.join(["lockstep", *words[inner + 1 :]])):
            return fault
        words = words[:inner]
    options = {option for parameter in known.params for option in [*parameter.opts, *parameter.secondary_opts]}
    for word in _before_the_script(words) if known.name in ("run", "verify") else words:
        option = word.strip("[]").split("=")[0]
        if option.startswith("-") and option.replace("_", "-") not in options | {"-h", "--help"}:
            return f"lockstep {known.name} has no option {option}"
    if is_synopsis or hasattr(known, "commands"):
        return None
    try:
        known.make_context(known.name, list(words))
    except typer.Exit:
        return None
    except Exception as refused:  # click's own class, or the one that typer carries
        return str(getattr(refused, "message", refused))
    return None


def _before_the_script(words: list[str]) -> list[str]:
    """Return the options of the command itself; those after the script belong to the script."""
    for number, word in enumerate(words):
        if word.endswith(".py") or word == "-m":
            return words[:number]
    return words


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1
