"""The annotated tree in docs/architecture.md, made from the docstrings: `python docs/tree.py` writes it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "lockstep"
PAGE = ROOT / "docs" / "architecture.md"

_BLOCK = re.compile(r"```text\nsrc/lockstep/\n.*?```", re.DOTALL)
_NOTE_COLUMN = 34


def tree() -> str:
    """The whole package, a line for each module: its name, and the first sentence of its docstring."""
    return "\n".join(["```text", "src/lockstep/", *_lines(PACKAGE, "  "), "```"])


def with_tree(page: str) -> str:
    assert _BLOCK.search(page), f"{PAGE} has no block that begins with src/lockstep/"
    return _BLOCK.sub(lambda _: tree(), page)


def _lines(folder: Path, indent: str) -> Iterator[str]:
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith(("_", ".")) or path.suffix == ".py")
    for path in entries:
        if path.suffix == ".py" and path.name != "__init__.py":
            yield _noted(f"{indent}{path.name}", path)
    others = [path.name for path in entries if path.is_file() and path.suffix not in (".py", ".typed")]
    if others:
        yield f"{indent}{' '.join(others)}"
    for path in entries:
        if path.is_dir() and (path / "__init__.py").exists():
            yield _noted(f"{indent}{path.name}/", path / "__init__.py")
            yield from _lines(path, f"{indent}  ")


def _noted(name: str, module: Path) -> str:
    docstring = ast.get_docstring(ast.parse(module.read_text())) or ""
    sentence = re.split(r"\. |\n\n", docstring, maxsplit=1)[0].replace("\n", " ").rstrip(".")
    return f"{name:<{_NOTE_COLUMN}}# {sentence}"


if __name__ == "__main__":
    PAGE.write_text(with_tree(PAGE.read_text()))
