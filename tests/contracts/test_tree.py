"""The guide's tree and table of places are right, unit tests mirror the package, and no merge was left half done."""

import re
import runpy
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE_API = "metrics/public_metrics"  # what a whole package offers: its `__init__.py`
MARKER = re.compile(rb"^(<{7}|\|{7}|>{7})( |$)", re.MULTILINE)


def test_the_guides_tree_is_up_to_date() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert runpy.run_path(str(ROOT / "docs" / "tree.py"))["with_tree"](page) == page, "run: python docs/tree.py"


def test_the_guides_table_of_places_is_right() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    _, _, table = page.partition("## Where do I find …")
    rows = [line.split("|")[1:4] for line in table.partition("##")[0].splitlines() if "`" in line]
    assert len(rows) >= 12
    for _, files, names in rows:
        sources = "".join((ROOT / "src" / "lockstep" / file).read_text() for file in re.findall(r"`(.*?)`", files))
        for name in re.findall(r"`([\w.]+)`", names):
            for part in name.split("."):
                assert re.search(rf"(class|def) {part}\b", sources), f"{name} is not in {files}"


def test_unit_tests_mirror_the_package() -> None:
    """`train/test_step.py` tests `train/step.py`; `test_weights_io_export.py` is a second file for `weights_io.py`."""
    unit, package = ROOT / "tests" / "unit", ROOT / "src" / "lockstep"
    misplaced = []
    for path in sorted(unit.rglob("test_*.py")):
        folder, name = path.relative_to(unit).parent, path.stem.removeprefix("test_")
        modules = [module.stem for module in (package / folder).glob("*.py")]
        if not any(f"{name}_".startswith(f"{module}_") for module in modules) and str(folder / name) != PACKAGE_API:
            misplaced.append(str(path.relative_to(unit)))
    assert misplaced == []


def test_no_file_has_merge_conflict_markers() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    files = [ROOT / name for name in listed.split("\0") if name]
    assert [str(path) for path in files if path.is_file() and MARKER.search(path.read_bytes())] == []
