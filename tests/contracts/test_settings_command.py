"""`lockstep settings`: every setting, with its default and what it does."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import call


def listed(tmp_path: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    finished = call(["settings", *arguments, "--json"], tmp_path)
    assert (finished.code, finished.err) == (0, "")
    rows = json.loads(finished.out)
    by_key = {row["key"]: row for row in rows}
    assert len({(row["job"], row["key"]) for row in rows}) == len(rows)
    return by_key


def test_every_setting_is_listed_with_its_type_its_default_and_what_it_does(tmp_path: Path) -> None:
    rows = listed(tmp_path)
    assert rows["optim.lr_scaling"] == {
        "key": "optim.lr_scaling",
        "default": "none",
        "expected": "one of none, linear, sqrt",
        "description": "scale lr by global batch / base_batch, or its square root",
        "is_required": False,
        "is_section": False,
        "job": "training",
    }
    assert rows["max_generations"]["job"] == "search"
    assert rows["batch"]["is_required"] and rows["batch"]["is_section"]


def test_a_prefix_selects(tmp_path: Path) -> None:
    assert list(listed(tmp_path, "checkpoint.keep")) == ["checkpoint.keep", "checkpoint.keep_every"]
    shown = call(["settings", "checkpoint.keep"], tmp_path, {"COLUMNS": "60"}).out
    assert shown == (
        "checkpoint.keep        3\n    a whole number greater than 0: the newest ones\n"
        "checkpoint.keep_every  –\n    a whole number greater than 0: also keep those whose\n"
        "    step is a multiple of this\n"
    )
    both = call(["settings", "e"], tmp_path).out
    assert both.index("Training, ") < both.index("\nepochs ") < both.index("Search only:") < both.index("\nevolution")


def test_a_recipes_settings_have_its_values(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("base: gpt\noptim: {lr: 0.5}\n")
    assert listed(tmp_path, "--recipe", "wing")["wing.speed"]["default"] == 60.0
    rows = listed(tmp_path, "--recipe", "mine.yaml")
    assert (rows["model.width"]["default"], rows["optim.lr"]["default"]) == (128, 0.5)
    assert rows["batch.global"]["default"] is not None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["optm"], "no setting begins with 'optm'; did you mean optim?"),
        (["--recipe", "digit"], "digit: neither a file nor a built-in recipe"),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, arguments: list[str], says: str) -> None:
    finished = call(["settings", *arguments], tmp_path)
    assert (finished.code, finished.out) == (2, "")
    assert finished.err.startswith(f"lockstep: {says}")
