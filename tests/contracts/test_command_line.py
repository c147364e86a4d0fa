"""`--help` for each command: there, useful, and without loading torch."""

import subprocess
import sys

import pytest

COMMANDS = ["train", "run"]


def help_of(*command: str) -> str:
    code = f"""
import sys
sys.argv = ["lockstep", *{command!r}, "--help"]
from lockstep.cli import main
try:
    main()
finally:
    print("LOADED", *sys.modules)
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 0, finished.stderr
    text, _, loaded = finished.stdout.rpartition("LOADED")
    assert not {"torch", "numpy"} & set(loaded.split())
    return text


def test_the_command_lists_its_commands() -> None:
    text = help_of()
    for name in [*COMMANDS, "verify"]:
        assert f" {name} " in text
    assert "..." not in text.partition("Commands:")[2], "each is told whole"


@pytest.mark.parametrize("command", COMMANDS)
def test_launch_options_have_torchruns_names(command: str) -> None:
    text = help_of(command)
    for option in ("-n", "--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port"):
        assert option in text
    assert f"lockstep {command}" in text, "an example to start from"


def test_verify_says_what_it_does() -> None:
    text = help_of("verify")
    for part in ("-n", "--steps", "--keep", "--json", "lockstep verify digits -n 4", "Exit code 0"):
        assert part in text


def test_batch_says_what_it_does() -> None:
    text = help_of("batch")
    for part in ("-n", "--memory-gb", "--limit-s", "--tries", "--json", "lockstep batch gpt", "Exit code 0"):
        assert part in text


def test_bench_says_what_it_does() -> None:
    text = help_of("bench")
    for part in (
        "-n",
        "--rounds",
        "--against",
        "--json",
        "mlp: ",
        "tiny: ",
        "conv: ",
        "gpt: ",
        "accelerate",
        "Exit code 0",
    ):
        assert part in text


def test_report_and_watch_say_what_they_do() -> None:
    text = help_of("report")
    for part in ("-o", "FILE.html", "--json", "lockstep report runs/digits", "speed-up"):
        assert part in text
    text = help_of("watch")
    for part in ("--web", "--port", "--once", "--patience", "lockstep watch runs/digits", "Exit code 0"):
        assert part in text


def test_submit_says_what_it_does() -> None:
    text = help_of("submit")
    for part in ("slurm", "kubernetes"):
        assert part in text
    text = help_of("submit", "slurm")
    for part in ("--nodes", "-n", "--gpus", "--time", "--stop-before", "--setup", "| sbatch", "-- train mine.yaml"):
        assert part in text
    text = help_of("submit", "kubernetes")
    for part in ("--image", "--nodes", "--volume", "kubectl apply", "-- train mine.yaml"):
        assert part in text


def test_version() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "lockstep", "--version"], capture_output=True, text=True, check=True
    )
    assert finished.stdout.startswith("lockstep 0.")
