"""Every example, unchanged, under every launcher; and one digest wherever lockstep trains."""

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.commands import LOCKSTEP, TORCHRUN, free_port, run
from tests.examples import spawn_alone, train_alone

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb", ".sh"))
SCRIPTS = [path for path in EXAMPLES if path.suffix == ".py"]
KEPT = {"gan": "media/samples-3.png", "transformers_gpt2": "model/model.safetensors"}  # by those that use lockstep

LAUNCHERS = {
    "python": [sys.executable],
    "lockstep run": [*LOCKSTEP, "run", "-n", "2"],
    "torchrun": [*TORCHRUN, "--nproc-per-node=2"],
    "its elder": [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "torch.distributed.launch",
        "--nproc-per-node=2",
        *TORCHRUN[1:],
    ],
}


def lines_of(name: str, launcher: str, folder: Path, options: str = "--steps 3") -> list[str]:
    # Hugging Face must not use the network; the port is for examples that start processes without a launcher.
    variables = {"HF_HUB_OFFLINE": "1", "MASTER_PORT": str(free_port())}
    folder.mkdir(exist_ok=True)
    command = [*LAUNCHERS[launcher], str(ROOT / "examples" / f"{name}.py"), *options.split()]
    finished = run(command, folder, variables, timeout_s=150)
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


@pytest.mark.parametrize(
    ("name", "launcher", "options"),
    [
        ("train", "torchrun", "--epochs 1 --batch-size 32"),
        pytest.param("train", "its elder", "--epochs 1 --global-batch 64", marks=pytest.mark.slow),
        ("spawn", "python", "--epochs 1 --nproc 2 --wrap ddp"),
        pytest.param("spawn", "python", "--epochs 1 --nproc 2 --by torch", marks=pytest.mark.slow),
    ],
)
def test_two_processes_have_the_digest_of_one(name: str, launcher: str, options: str, tmp_path: Path) -> None:
    lines = lines_of(name, launcher, tmp_path, options)
    (begin,) = [line for line in lines if line.startswith("start ")]  # printed by one rank alone
    assert "processes 2" in begin
    assert f"effective_batch {64 if name == 'train' else 128}," in begin
    alone = tmp_path / "alone"
    digest = train_alone(alone, epochs=1) if name == "train" else spawn_alone(alone, epochs=1, wrap="dp")
    assert f": digest {digest}" in lines[-1]
    accuracies = re.findall(r"accuracy ([\d.]+)", "\n".join(lines))
    assert float(accuracies[-1]) > 0.25, "a guess is right in 0.1"


def test_a_search_finds_one_design_and_resumes_where_it_was(tmp_path: Path) -> None:
    one = lines_of("tune_digits", "python", tmp_path / "one", "--population 4 --generations 2")
    begun = lines_of("tune_digits", "torchrun", tmp_path / "two", "--population 4 --generations 1")
    ended = lines_of("tune_digits", "lockstep run", tmp_path / "two", "--population 4 --generations 2")
    outputs = [[line.split(" evaluated in ")[0] for line in lines] for lines in (one, begun, ended)]
    assert [line for line in outputs[1] if line.startswith("generation    1  best error")] == outputs[0][1:2]
    second = next(place for place, line in enumerate(outputs[0]) if line.startswith("generation    2  best error"))
    assert outputs[2][3:] == [line for line in outputs[0][second:] if line != "saved checkpoints/step-1"]
    assert re.fullmatch(r"digest [0-9a-f]{64}", one[-3])
    assert re.fullmatch(r"test error of the best design: \d+\.\d\d %", one[-1])


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


def test_the_plain_twin_learns_and_resumes_where_it_was(tmp_path: Path) -> None:
    first = lines_of("train_plain_ddp", "its elder", tmp_path, "--epochs 1 --batch-size 32")
    second = lines_of("train_plain_ddp", "python", tmp_path, "--epochs 2 --global-batch 64")
    assert [first[0], second[0]] == ["effective batch 64, processes 2", "effective batch 64, processes 1"]
    assert [line.split(":")[0] for line in first[1:] + second[1:]] == ["epoch 1", "epoch 2"]
    assert float(second[1].split("accuracy ")[1]) > 0.6


@pytest.mark.timeout(30)
def test_the_plain_twins_end_if_there_is_nothing_to_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train_plain_ddp.py", "--batch-size=5000"])
    with pytest.raises(SystemExit, match="a batch of 5000 is larger than the 1437 images to train on"):
        runpy.run_path(str(ROOT / "examples" / "train_plain_ddp.py"), run_name="__main__")
    monkeypatch.setattr(sys, "argv", ["gan_plain_ddp.py", "--steps=0"])
    runpy.run_path(str(ROOT / "examples" / "gan_plain_ddp.py"), run_name="__main__")


@pytest.mark.parametrize("name", ["train", "gan"])
def test_twins_train_the_same(name: str) -> None:
    """A reader compares the two files to see how each of them trains."""
    functions = [
        {node.name: ast.unparse(node) for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        for path in (ROOT / "examples" / f"{name}.py", ROOT / "examples" / f"{name}_plain_ddp.py")
    ]
    same = [function for function in functions[0] if function.startswith(("make_", "load_"))]
    assert same
    for function in same:
        assert functions[0][function] == functions[1][function]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_it_says_how_to_run_it(path: Path) -> None:
    opening = path.read_text().split('"""')[1]
    for command in ("python", "lockstep run -n 2", "torchrun --nproc-per-node 2"):
        assert f"    {command} examples/{path.name}" in opening


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_list_of_examples_has_it(path: Path) -> None:
    assert f"[{path.name}]({path.name})" in (ROOT / "examples" / "README.md").read_text()
