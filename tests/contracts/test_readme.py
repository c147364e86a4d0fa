"""The README's script and config run as printed."""

import re
import tomllib
from pathlib import Path

from lockstep.recipes.registry import builtin_names
from tests.commands import LOCKSTEP, run

ROOT = Path(__file__).parents[2]


def test_the_two_commands_are_on_the_first_screen() -> None:
    first_screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:40])
    assert "make demo" in first_screen
    assert "make test" in first_screen


def test_its_script_and_its_config_run_unchanged(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    script = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "lockstep.launch" in block)
    (tmp_path / "train.py").write_text(script)
    digests = set()
    for number in (1, 2):
        finished = run([*LOCKSTEP, "run", "-n", str(number), "train.py"], tmp_path)
        assert finished.code == 0, finished.err
        digests |= set(re.findall("digest ([0-9a-f]{64})", finished.out))
    assert len(digests) == 1
    (tmp_path / "mine.yaml").write_text(next(re.finditer(r"```yaml\n(# mine.yaml.*?)```", text, re.DOTALL))[1])
    finished = run([*LOCKSTEP, "train", "mine.yaml", "--quick", "--quiet"], tmp_path)
    assert finished.code == 0, finished.err


def test_the_table_of_recipes_names_the_extra_of_each() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    rows = re.findall(r"^\| \[`(\w+)`\].*\|([^|]*)\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {name for name, _ in rows} == set(builtin_names())
    assert {name: cell.split()[0].strip("`,") for name, cell in rows} == {
        name: name if name in extras else "–" for name in builtin_names()
    }
