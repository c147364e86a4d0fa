"""Every example, unchanged, under every launcher; and one digest wherever lockstep trains."""

import re
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.commands import LOCKSTEP, TORCHRUN, run

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NAMES = [path.stem for path in EXAMPLES]
KEPT = {"gan": "media/samples-3.png", "transformers_gpt2": "model/model.safetensors"}  # by those that use lockstep

LAUNCHERS = {
    "python": [sys.executable],
    "lockstep run": [*LOCKSTEP, "run", "-n", "2"],
    "torchrun": [*TORCHRUN, "--nproc-per-node=2"],
}


def lines_of(name: str, launcher: str, folder: Path, options: str = "--steps 3") -> list[str]:
    offline = {"HF_HUB_OFFLINE": "1"}  # a look at the network would be an error
    folder.mkdir(exist_ok=True)
    command = [*LAUNCHERS[launcher], str(ROOT / "examples" / f"{name}.py"), *options.split()]
    finished = run(command, folder, offline, timeout_s=150)
    assert finished.code == 0, finished.err
    return finished.out.splitlines()


@pytest.mark.parametrize("name", sorted(KEPT))
def test_one_and_two_processes_give_one_digest(name: str, tmp_path: Path) -> None:
    one, two = (lines_of(name, launcher, tmp_path / launcher) for launcher in ("python", "lockstep run"))
    assert "processes 1" in one[0]
    assert "processes 2" in two[0]
    assert re.fullmatch(r"end 3: digest [0-9a-f]{64}", one[-1])
    logged = [
        [line for line in lines[1:] if not line.startswith("checkpoint")] for lines in (one, two)
    ]  # these tell times
    assert logged[0] == logged[1], "what was logged on the way is the same too"
    kept = [tmp_path / launcher / "runs" / name / KEPT[name] for launcher in ("python", "lockstep run")]
    assert kept[0].read_bytes() == kept[1].read_bytes()
    if kept[0].suffix == ".safetensors":
        weights = load_file(kept[0])
        assert weights["transformer.wte.weight"].shape == (256, 64), "as the library names it, without a prefix"


def test_a_search_finds_one_design_and_goes_on_where_it_was(tmp_path: Path) -> None:
    one = lines_of("tune_digits", "python", tmp_path / "one", "--population 4 --generations 2")
    begun = lines_of("tune_digits", "torchrun", tmp_path / "two", "--population 4 --generations 1")
    ended = lines_of("tune_digits", "lockstep run", tmp_path / "two", "--population 4 --generations 2")
    told = [[line.split(" evaluated in ")[0] for line in lines] for lines in (one, begun, ended)]
    assert [line for line in told[1] if line.startswith("generation    1  best error")] == told[0][1:2]
    second = next(place for place, line in enumerate(told[0]) if line.startswith("generation    2  best error"))
    assert told[2][3:] == [line for line in told[0][second:] if line != "saved checkpoints/step-1"]
    assert re.fullmatch(r"digest [0-9a-f]{64}", one[-3])
    assert re.fullmatch(r"on images .*, the best design is wrong in \d+\.\d\d %", one[-1])


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("gan_plain_ddp", "torchrun"),
        ("transformers_gpt2", "torchrun"),
        pytest.param("gan", "torchrun", marks=pytest.mark.slow),
        pytest.param("gan_plain_ddp", "python", marks=pytest.mark.slow),
        pytest.param("gan_plain_ddp", "lockstep run", marks=pytest.mark.slow),
    ],
)
def test_it_runs_unchanged(name: str, launcher: str, tmp_path: Path) -> None:
    # Counted in the whole text: lines of two processes may run into each other.
    text = "\n".join(lines_of(name, launcher, tmp_path))
    assert len(re.findall(r"step 3: (?:discriminator_)?loss", text)) == 1, "one rank alone prints"


@pytest.mark.parametrize("path", EXAMPLES, ids=NAMES)
def test_it_says_how_to_run_it_and_the_readme_knows_it(path: Path) -> None:
    opening = path.read_text().split('"""')[1]
    for command in ("python", "lockstep run -n 2", "torchrun --nproc-per-node 2"):
        assert f"    {command} examples/{path.name}" in opening
    assert f"examples/{path.name}" in (ROOT / "README.md").read_text()
