"""Two machines: two launchers with a disk each, and network namespaces with a cable between them."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.commands import free_port, run, started
from tests.examples import EXAMPLES, spawn_alone, train_alone


class Network(NamedTuple):
    prefixes: list[list[str]]  # what a command on machine 0, or 1, begins with
    address: str  # of machine 0


@contextmanager
def two_namespaces() -> Iterator[Network]:
    """Create two network namespaces, which act as two hosts. This machine's name resolves to loopback on both."""
    names = [f"lockstep-{os.getpid()}-{number}" for number in range(2)]
    try:
        try:
            for name in names:
                _ip(f"netns add {name}")
            _ip(f"link add cable netns {names[0]} type veth peer name cable netns {names[1]}")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        for number, name in enumerate(names):
            _ip(f"-n {name} addr add 10.99.0.{number + 1}/24 dev cable")
            _ip(f"-n {name} link set lo up")
            _ip(f"-n {name} link set cable up")
        yield Network([["ip", "netns", "exec", name] for name in names], "10.99.0.1")
    finally:
        for name in names:
            with suppress(OSError, subprocess.CalledProcessError):
                _ip(f"netns del {name}")


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True, timeout=10)


def on_both(commands: list[list[str]], variables: list[dict[str, str]], folder: Path) -> str:
    """Run the command on both at once, each with its own disk; return what machine 0 printed."""
    with ExitStack() as stack:
        running = []
        for number, (command, environment) in enumerate(zip(commands, variables, strict=True)):
            own = folder / str(number)
            own.mkdir(exist_ok=True)
            running.append(stack.enter_context(started(command, own, environment)))
        outputs = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert outputs[1][0] == "", "rank 0 alone prints"
    assert not list((folder / "1").glob("runs/*/checkpoints")), "rank 0 alone saves"
    return outputs[0][0]


def digest_in(text: str) -> str:
    (found,) = re.findall(r"^end \d+: digest ([0-9a-f]{64})\b", text, flags=re.MULTILINE)
    return str(found)


def test_a_run_started_on_one_machine_finishes_on_two(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    begun = run([sys.executable, str(EXAMPLES / "train.py"), "--epochs=1", "--batch-size=64"], tmp_path / "0")
    assert begun.code == 0, begun.err
    options = ["--epochs=2", "--global-batch=64"]
    commands = [[str(EXAMPLES / "two_machines.sh"), str(number), "127.0.0.1", *options] for number in range(2)]
    text = on_both(commands, [{"PORT": str(free_port()), "PYTHON": sys.executable}] * 2, tmp_path)
    assert "processes 2" in text
    assert "resumed runs/train-64/checkpoints/step-22" in text
    assert digest_in(text) == train_alone(tmp_path / "alone", epochs=2)


@pytest.mark.slow
def test_machines_find_each_other_and_rank_is_the_first_of_each(tmp_path: Path) -> None:
    """As in RANK=4 WORLD_SIZE=8, for a script that starts its machine's processes itself."""
    command = [sys.executable, str(EXAMPLES / "spawn.py"), "--epochs=1", "--nproc=2"]
    with two_namespaces() as (prefixes, address):
        meet = {"MASTER_ADDR": address, "MASTER_PORT": "29500", "WORLD_SIZE": "4"}
        commands = [[*prefix, *command] for prefix in prefixes]
        text = on_both(commands, [meet | {"RANK": first} for first in ("0", "2")], tmp_path)
    assert "processes 4" in text
    assert digest_in(text) == spawn_alone(tmp_path / "alone", epochs=1, wrap="none")


def test_wrong_arguments_print_the_usage(tmp_path: Path) -> None:
    finished = run([str(EXAMPLES / "two_machines.sh"), "0"], tmp_path)
    assert finished.code == 2
    assert finished.err.startswith("usage: ")
