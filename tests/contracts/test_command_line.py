"""`--help` of each command: useful, and without importing torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import LOCKSTEP, call, help_of, run

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
    "submit": ["slurm", "kubernetes"],
    "submit slurm": ["--nodes", "-n", "--gpus", "--time", "--stop-before", "--setup", "| sbatch", "-- train mine.yaml"],
    "submit kubernetes": ["--image", "--nodes", "--volume", "kubectl apply", "-- train mine.yaml"],
}
TORCHRUN_OPTIONS = ("-n", "--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port")


@pytest.mark.parametrize("command", HELP)
def test_help_mentions_what_a_user_needs(command: str) -> None:
    text = help_of(command)
    assert [part for part in HELP[command] if part not in text] == []


@pytest.mark.parametrize("group", ["", "ckpt", "submit"])
def test_every_command_is_listed_with_its_whole_summary(group: str) -> None:
    assert "..." not in help_of(group).partition("Commands:")[2]


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


def test_version(tmp_path: Path) -> None:
    assert run([*LOCKSTEP, "--version"], tmp_path).out.startswith("lockstep 0.")


def test_a_call_in_this_process_ends_like_a_real_command(tmp_path: Path) -> None:
    """For an unknown command, an unknown option and an error that lockstep reports."""
    for arguments in (["trian"], ["train", "--no-such"], ["train", "nowhere.yaml"]):
        here, real = call(arguments, tmp_path), run([*LOCKSTEP, *arguments], tmp_path)
        assert (here.code, here.out) == (real.code, real.out) == (2, "")
        assert here.err.splitlines()[-1] == real.err.splitlines()[-1]
