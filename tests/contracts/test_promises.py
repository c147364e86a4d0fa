"""docs/promises.md: every promise has its row, and every file and test that a row names exists."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "promises.md").read_text()
PROMISED, _, PLANNED = PAGE.partition("## Being written")
NUM_ROWS = {"A": 18, "C": 19, "R": 15, "F": 15, "T": 9, "L": 9}

ROWS = {row[0].strip(): row[1:] for row in (line.strip("| \n").split("|") for line in PROMISED.splitlines()) if row[1:]}
ROWS = {name: cells for name, cells in ROWS.items() if re.fullmatch(r"[A-Z]\d+", name)}


def files_in(text: str) -> set[str]:
    """Return what looks like a path in the repository; paths of tests may omit `tests/`."""
    found = re.findall(r"`((?:src|docs|bench|examples|tests|unit|ranks|contracts|faults|recipes)/[\w./]+)", text)
    return {
        path if path.split("/")[0] in ("src", "docs", "bench", "examples", "tests") else f"tests/{path}"
        for path in found
        if path != "ranks/R.jsonl"  # of a run folder
    }


@cache
def defined_in(file: str) -> set[str]:
    return set(re.findall(r"^def (test_\w+)\(", (ROOT / file).read_text(), re.MULTILINE))


def test_every_promise_has_one_row() -> None:
    names = re.findall(r"^\| ([A-Z]\d+) \|", PROMISED, re.MULTILINE)
    assert sorted(names) == sorted(f"{system}{n}" for system, count in NUM_ROWS.items() for n in range(1, count + 1))


@pytest.mark.parametrize("name", ROWS)
def test_what_a_row_names_exists(name: str) -> None:
    promise, place, proof = ROWS[name]
    assert promise.strip() and place.strip()
    planned = files_in(PLANNED)
    missing = {file for file in files_in(place + proof) if not (ROOT / file).exists()}
    assert missing <= planned
    named = [(f"tests/{file}", test) for file, test in re.findall(r"`([\w/]+\.py)::(\w+)`", proof)]
    assert not [(file, test) for file, test in named if file not in missing and test not in defined_in(file)]
    assert re.search(r"test_|not yet|measured", proof), "a row says how it is shown, or that it is not"


def test_nothing_that_exists_is_listed_as_planned() -> None:
    assert not {file for file in files_in(PLANNED) if (ROOT / file).exists()}
