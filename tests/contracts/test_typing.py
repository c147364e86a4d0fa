"""Type checkers see the API: a correct script passes `mypy --strict`, and a misspelt option or name does not."""

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# In examples/train.py: what is replaced, by what, and what mypy then says.
MISTAKES = {
    "option": ("clip_norm=1.0)", 'precison="bf16")', 'Unexpected keyword argument "precison" for "Run"'),
    "value": ("clip_norm=1.0)", 'precision="bf17")', 'Argument "precision" to "Run" has incompatible type'),
    "lanes": ("lanes=LANES)", "lane=LANES)", 'Unexpected keyword argument "lane" for "loader" of "Run"'),
    "shuffle": ("lanes=LANES)", "shufle=False)", 'Unexpected keyword argument "shufle" for "loader" of "Run"'),
    "save": ("save_every=", "save_evry=", 'Unexpected keyword argument "save_evry" for "steps" of "Run"'),
    "name": ("lockstep.Schedule.", "lockstep.Scheduel.", 'Module has no attribute "Scheduel"'),
    "method": ("step.accumulate(", "step.acumulate(", '"Step" has no attribute "acumulate"'),
}


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return what mypy says about the example without and with each mistake, in one run: mypy has to read torch."""
    folder = tmp_path_factory.mktemp("scripts")
    script = (ROOT / "examples" / "train.py").read_text()
    (folder / "correct.py").write_text(script)
    for name, (right, wrong, _) in MISTAKES.items():
        assert right in script
        (folder / f"{name}.py").write_text(script.replace(right, wrong))
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", f"--python-executable={sys.executable}"]
    places = [f"--config-file={ROOT / 'pyproject.toml'}", f"--cache-dir={ROOT / '.mypy_cache'}"]
    paths = sorted(map(str, folder.glob("*.py")))
    finished = subprocess.run([*command, *places, *paths], capture_output=True, text=True, check=False)
    assert not finished.stderr
    found = defaultdict(list)
    for line in finished.stdout.splitlines():
        path, _, message = line.partition(":")
        found[Path(path).stem].append(message)
    return found


def test_the_everyday_script_passes(findings: dict[str, list[str]]) -> None:
    assert findings["correct"] == []


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(findings: dict[str, list[str]], mistake: str) -> None:
    assert any(MISTAKES[mistake][2] in message for message in findings[mistake])
