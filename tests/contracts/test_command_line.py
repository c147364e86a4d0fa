"""`--help` of each command: useful, and without importing torch."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from lockstep import cli
from tests.commands import LOCKSTEP, call, clean_environment, help_of, run

# What the help of a command must mention.
HELP = {
    "": ["train", "run", "verify", "chaos", "submit"],
    "train": ["lockstep train digits -n 2", "--run", "--quick", "--stop-after"],
    "run": ["lockstep run -n 4 train.py", "--max-restarts", "-m"],
    "verify": ["-n", "--steps", "--keep", "--json", "lockstep verify digits -n 4", "Exit code 0"],
    "batch": ["-n", "--memory-gb", "--limit-s", "--tries", "--json", "lockstep batch gpt", "Exit code 0"],
    "bench": ["-n", "--rounds", "--against", "mlp: ", "tiny: ", "conv: ", "gpt: ", "accelerate", "Exit code 0"],
    "chaos": ["-n", "--kills", "--seed", "--keep", "--json", "lockstep chaos digits --kills 20", "Exit code 0"],
    "init": ["lockstep init train.py", "SCRIPT"],
    "report": ["-o", "FILE.html", "--json", "lockstep report runs/digits", "speed-up"],
    "watch": ["--web", "--port", "--once", "--patience", "lockstep watch runs/digits", "Exit code 0"],
    "settings": ["PREFIX", "--recipe", "--json", "lockstep settings optim"],
    "submit": ["slurm", "kubernetes"],
    "submit slurm": ["--nodes", "-n", "--gpus", "--time", "--stop-before", "--setup", "| sbatch", "-- train mine.yaml"],
    "submit kubernetes": ["--image", "--nodes", "--volume", "kubectl apply", "-- train mine.yaml"],
}
TORCHRUN_OPTIONS = ("-n", "--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port")


@pytest.mark.parametrize("command", HELP)
def test_help_mentions_what_a_user_needs(command: str) -> None:
    text = help_of(command)
    assert [part for part in HELP[command] if part not in text] == []


def _all_commands(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every command and group, by what follows `lockstep`."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from _all_commands(child, f"{path} {name}".strip())


ALL_COMMANDS = dict(_all_commands(typer.main.get_command(cli.app)))


@pytest.mark.parametrize("path", ALL_COMMANDS)
@pytest.mark.parametrize("width", [50, 80])
def test_help_is_whole_sentences_in_a_terminal_of_any_width(path: str, width: int) -> None:
    """By itself, click cuts a command's summary to the width of the terminal."""
    shown = call([*path.split(), "--help"], Path.cwd(), {"COLUMNS": str(width)}).out
    command = ALL_COMMANDS[path]
    summaries = [child.get_short_help_str(1000) for child in getattr(command, "commands", {}).values()]
    assert [summary for summary in summaries if not summary.endswith(".")] == []
    texts = [command.help, *(parameter.help for parameter in command.params), *summaries]
    assert [text for text in texts if text and _solid(text) not in _solid(shown)] == []


def _solid(text: str) -> str:
    """Return the text without the line breaks that the terminal's width decides."""
    return "".join(text.replace("\b", "").split())


@pytest.mark.parametrize("command", ["train", "run"])
def test_launch_options_have_torchruns_names(command: str) -> None:
    text = help_of(command)
    assert [option for option in TORCHRUN_OPTIONS if option not in text] == []


def test_help_does_not_import_torch() -> None:
    """In one new process, for all commands: this one has imported torch already."""
    code = f"""
import json, sys
from lockstep.cli import main
for command in {list(HELP)!r}:
    sys.argv = ["lockstep", *command.split(), "--help"]
    try:
        main()
    except SystemExit as end:
        assert not end.code, command
print(json.dumps(sorted({{"torch", "numpy"}} & set(sys.modules))))
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout.splitlines()[-1]) == []


# What is typed in bash, where `=` ends a word: the words, and what is offered for the last one.
COMPLETIONS = [
    (["train", "di"], ["digits"]),
    (["train", "m"], ["mine.yaml", "my/"]),
    (["train", "my/"], ["my/other.yml"]),
    (["verify", "plan"], ["planted.py"]),
    (["train", "gpt", "model."], ["model.width=", "model.depth=", "model.heads=", "model.dropout="]),
    (["train", "mine.yaml", "wing.sp"], ["wing.speed="]),
    (["train", "own.yaml", "evaluation"], ["evaluation_batch="]),
    (["train", "no.yaml", "optim.lr"], ["optim.lr=", "optim.lr_scaling="]),
    (["batch", "gpt", "optim.lr", "=", "1", "schedule.k"], ["schedule.kind="]),
    (["plan", "gpt", "schedule.kind", "="], ["constant", "linear", "cosine", "step"]),
    (["verify", "gpt", "schedule.kind", "=", "li"], ["linear"]),
    (["chaos", "gpt", "tf32", "=", ""], ["true", "false"]),
    (["settings", "checkpoint.k"], ["checkpoint.keep", "checkpoint.keep_every"]),
    (["settings", "--recipe", "wing", "wing.sp"], ["wing.speed"]),
    (["settings", "--recipe", "vi"], []),
]


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    (tmp_path / "mine.yaml").write_text("recipe: wing\n")
    (tmp_path / "own.yaml").write_text("recipe: planted:recipe\n")
    (tmp_path / "planted.py").write_text("from pathlib import Path\nPath('executed').touch()\n")
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "other.yml").touch()
    return tmp_path


def _completion(words: list[str]) -> dict[str, str]:
    return {
        "_LOCKSTEP_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["lockstep", *words]),
        "COMP_CWORD": str(len(words)),
    }


@pytest.mark.parametrize(("words", "offered"), COMPLETIONS)
def test_the_shell_completes_recipes_files_and_settings(configs: Path, words: list[str], offered: list[str]) -> None:
    assert call([], configs, _completion(words)).out.split() == offered
    assert not (configs / "executed").exists()  # a recipe of the user's is not imported


def test_of_nothing_the_outermost_keys_are_offered(configs: Path) -> None:
    offered = call([], configs, _completion(["train", "gpt", ""])).out.splitlines()
    assert {"epochs=", "optim.", "model."} <= set(offered)
    assert not [each for each in offered if "." in each[:-1]]


def test_completion_imports_no_torch(configs: Path) -> None:
    code = """
import json, sys
from lockstep.cli import main
sys.argv = ["lockstep"]
try:
    main()
finally:
    print(json.dumps(sorted({"torch", "numpy"} & set(sys.modules))))
"""
    env = clean_environment() | _completion(["train", "gpt", "model."])
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=configs, env=env
    )
    assert finished.stdout.splitlines()[0] == "model.width=", finished.stderr
    assert finished.stdout.splitlines()[-1] == "[]"


def test_version(tmp_path: Path) -> None:
    assert run([*LOCKSTEP, "--version"], tmp_path).out.startswith("lockstep 0.")


def test_a_call_in_this_process_ends_like_a_real_command(tmp_path: Path) -> None:
    """For an unknown command, an unknown option and an error that lockstep reports."""
    for arguments in (["trian"], ["train", "--no-such"], ["train", "nowhere.yaml"]):
        here, real = call(arguments, tmp_path), run([*LOCKSTEP, *arguments], tmp_path)
        assert (here.code, here.out) == (real.code, real.out) == (2, "")
        assert here.err.splitlines()[-1] == real.err.splitlines()[-1]
