"""However a launch ends: the cause is printed first, the exit code says what happened, and no process is left."""

import json
import os
import re
import signal
import socket
import sys
from pathlib import Path
from textwrap import indent

import pytest

from lockstep.launcher.worker_main import STACK_DUMP_SIGNAL
from tests.commands import BIN, LOCKSTEP, call, free_port, is_running, port_is_open, run, started, wait_for
from tests.contracts.mistakes.mistake import training_script

HOST = socket.gethostname()
TWO = [*LOCKSTEP, "run", "-n", "2"]

# Writes its process id, then does what the argument says for its rank: {"1": "raise"}.
ACTOR = """
import atexit, json, os, pathlib, signal, sys, time
import lockstep, torch

def main(world):
    pathlib.Path(f"rank-{world.rank}.pid").write_text(str(os.getpid()))
    lockstep.barrier()
    act = json.loads(sys.argv[1]).get(str(world.rank))
    if act == "raise":
        raise ValueError("planted")
    if act == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "kill late":  # without a report, and after its victim has ended
        lockstep.cleanup_distributed()
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    if act in ("exit", "leave"):
        atexit.register(time.sleep, 5)  # its connections close long before it ends: its victim ends first
    if act == "exit":
        sys.exit(7)
    if act == "leave":
        return
    if act == "user error":
        from lockstep.errors import UserError
        raise UserError("data.path: no such file")
    lockstep.all_reduce(torch.ones(1))   # waits for the ranks that act

if __name__ == "__main__":
    lockstep.launch(main, device="cpu")
"""

# Needs no torch, so it starts at once; sleeps until it is stopped.
SLEEPER = """
import os, pathlib, sys, time
rank = os.environ["RANK"]
pathlib.Path(f"rank-{rank}.pid").write_text(str(os.getpid()))
time.sleep(120)
"""

LOADER = """
import os, pathlib, time
import torch
from torch.utils.data import DataLoader

class Slow(torch.utils.data.Dataset):
    def __len__(self): return 1000
    def __getitem__(self, index):
        pathlib.Path(f"data-{os.getpid()}.pid").write_text(str(os.getpid()))
        time.sleep(0.1)
        return index

if __name__ == "__main__":
    pathlib.Path(f"rank-{os.environ['RANK']}.pid").write_text(str(os.getpid()))
    for _ in DataLoader(Slow(), num_workers=1):
        pass
"""

RECIPES = "cricket, digits, ebm, gpt, resnet, vae, wing"


def script(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return "script.py"


def pids(folder: Path, pattern: str = "rank-*.pid") -> list[int]:
    return [int(path.read_text()) for path in folder.glob(pattern) if path.read_text()]


@pytest.mark.parametrize(
    ("act", "first_line"),
    [
        ("raise", f"lockstep: rank 1 of 2 on {HOST} failed, the cause: ValueError: planted"),
        ("kill", f"lockstep: rank 1 of 2 on {HOST} failed, the cause: killed by SIGKILL"),
        ("kill late", f"lockstep: rank 1 of 2 on {HOST} failed, the cause: killed by SIGKILL"),
        ("exit", f"lockstep: rank 1 of 2 on {HOST} failed, the cause: exited with code 7"),
        ("leave", f"lockstep: rank 1 of 2 on {HOST} failed, the cause: it finished early (exit code 0)"),
    ],
)
def test_the_cause_comes_first_and_the_victims_in_one_line(tmp_path: Path, act: str, first_line: str) -> None:
    finished = run([*TWO, script(tmp_path, ACTOR), json.dumps({"1": act})], tmp_path)
    assert finished.code == 3
    lines = finished.err.splitlines()
    assert lines[0].startswith(first_line), finished.err
    assert lines[-1].startswith("its victims: rank 0 ("), finished.err
    assert finished.err.count("Traceback") == (1 if act == "raise" else 0)
    if act == "raise":
        assert 'raise ValueError("planted")' in finished.err
        assert "worker_main.py" not in finished.err, "frames between the launcher and the script are noise"


def test_a_users_mistake_seen_by_all_ranks_is_printed_once(tmp_path: Path) -> None:
    finished = run([*TWO, script(tmp_path, ACTOR), json.dumps({"0": "user error", "1": "user error"})], tmp_path)
    assert finished.code == 2
    assert finished.err.splitlines() == ["lockstep: data.path: no such file"]


def test_restarts_are_counted_and_every_attempt_gets_a_fresh_store(tmp_path: Path) -> None:
    # Plain torch, which stores its addresses under the same keys in every attempt.
    text = """
import os
import torch, torch.distributed as dist
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
print("left behind" if store.check([f"left behind by {rank}"]) else "fresh")
store.set(f"left behind by {rank}", "1")
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print(f"attempt {attempt} of rank {rank}")
if attempt == "0" and rank == "0":
    raise RuntimeError("the first time only")
dist.barrier()
dist.destroy_process_group()
"""
    finished = run([*TWO, "--max-restarts", "1", script(tmp_path, text)], tmp_path)
    assert finished.code == 0, finished.err
    assert f"rank 0 of 2 on {HOST} failed, the cause: RuntimeError: the first time only" in finished.err
    assert "restarting all ranks" in finished.err
    assert finished.out.count("fresh") == 4, finished.out
    assert "attempt 1 of rank 0" in finished.out
    assert "attempt 1 of rank 1" in finished.out


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_request_ends_everything(tmp_path: Path, stop: signal.Signals) -> None:
    with started([*TWO, script(tmp_path, SLEEPER)], tmp_path) as agent:
        wait_for(lambda: len(pids(tmp_path)) == 2, 30, "both ranks started")
        agent.send_signal(stop)
        _, err = agent.communicate(timeout=20)
        assert agent.returncode == 128 + stop, "nothing was saved: a scheduler must not start it again"
        assert f"stopped on request ({stop.name}): no checkpoint of a run to continue from" in err
        assert "Traceback" not in err
        assert not any(map(is_running, pids(tmp_path)))


# Saves a run to its end; then, as in an evaluation, it is not in a loop that would save on request.
SAVED = training_script(
    before="import os, pathlib, time",
    after="pathlib.Path(f'rank-{world.rank}.pid').write_text(str(os.getpid()))\ntime.sleep(120)",
)


def test_a_run_that_was_saved_before_can_be_continued(tmp_path: Path) -> None:
    with started([*LOCKSTEP, "run", "-n", "1", script(tmp_path, SAVED)], tmp_path) as agent:
        wait_for(lambda: len(pids(tmp_path)) == 1, 30, "the run is saved")
        agent.send_signal(signal.SIGTERM)
        _, err = agent.communicate(timeout=20)
    assert agent.returncode == 75
    assert "run the same command again to continue from the newest checkpoint in" in err


STUBBORN = """
import os, pathlib, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(f"rank-{os.environ['RANK']}.pid").write_text(str(os.getpid()))
time.sleep(120)
"""


def test_a_second_stop_request_is_immediate(tmp_path: Path) -> None:
    with started([*TWO, script(tmp_path, STUBBORN)], tmp_path) as agent:
        wait_for(lambda: len(pids(tmp_path)) == 2, 30, "both ranks started")
        agent.send_signal(signal.SIGINT)
        assert agent.stderr is not None
        assert "signal again to kill them at once" in agent.stderr.readline()
        agent.send_signal(signal.SIGINT)
        agent.communicate(timeout=10)
        assert agent.returncode == 128 + signal.SIGINT
        assert not any(map(is_running, pids(tmp_path)))


@pytest.mark.slow
def test_a_rank_that_misses_the_interrupt_is_stopped_nevertheless(tmp_path: Path) -> None:
    deaf = SLEEPER.replace("time.sleep", "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep")
    with started([*TWO, "--grace", "4", script(tmp_path, deaf)], tmp_path) as agent:
        wait_for(lambda: len(pids(tmp_path)) == 2, 30, "both ranks started")
        agent.send_signal(signal.SIGINT)
        _, err = agent.communicate(timeout=15)
        assert agent.returncode == 128 + signal.SIGINT
        assert "killing them" not in err


@pytest.mark.slow
def test_a_script_that_saves_itself_on_an_interrupt_has_the_grace_period_for_it(tmp_path: Path) -> None:
    sleeper = indent(SLEEPER, "    ")  # all of it: the signal may come as soon as the process id can be read
    saves = f"try:{sleeper}except KeyboardInterrupt:\n    time.sleep(6)\n    pathlib.Path('saved').touch()"
    with started([*LOCKSTEP, "run", "-n", "1", script(tmp_path, saves)], tmp_path) as agent:
        wait_for(lambda: len(pids(tmp_path)) == 1, 30, "the rank started")
        agent.send_signal(signal.SIGINT)
        _, err = agent.communicate(timeout=30)
        assert agent.returncode == 0, "the script's own"
    assert "stopped on request (SIGINT): the script handled it and ended by itself" in err
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("waiting_for", ["a machine", "a rank"])
def test_a_stop_request_ends_a_wait_for_others(tmp_path: Path, waiting_for: str) -> None:
    port = str(free_port())
    alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    meet = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", port]
    command, env = {
        "a machine": ([*LOCKSTEP, "run", "-n", "1", *meet, script(tmp_path, ACTOR)], {}),
        "a rank": ([*LOCKSTEP, "train", "digits", "--quick"], alone),
    }[waiting_for]
    with started(command, tmp_path, env) as process:
        wait_for(lambda: port_is_open(int(port)), 30, "it waits for the other")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
        assert process.returncode == 128 + signal.SIGINT
        assert "stopped on request (SIGINT)" in err
        assert "Traceback" not in err


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_request_without_an_agent(tmp_path: Path, stop: signal.Signals) -> None:
    with started([*LOCKSTEP, "train", "digits", "epochs=1000"], tmp_path) as process:
        wait_for(lambda: (tmp_path / "runs" / "digits" / "events.jsonl").exists(), 30, "training started")
        process.send_signal(stop)
        _, err = process.communicate(timeout=20)
        assert process.returncode == 75
        asked, stopped = err.splitlines()
        assert asked == f"lockstep: stopping after this step ({stop.name}); signal again to end at once"
        assert re.fullmatch(
            r"lockstep: stopped after step \d+, as requested: run the same command again to continue", stopped
        )


def test_a_failure_without_an_agent_has_the_same_exit_code(tmp_path: Path) -> None:
    finished = run([*LOCKSTEP, "run", script(tmp_path, "def f():\n    raise ValueError('planted')\nf()\n")], tmp_path)
    assert finished.code == 3
    lines = finished.err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].startswith('  File "script.py", line 3'), "the user's first line comes first"
    assert lines[-1] == "ValueError: planted"


def test_the_stack_of_any_script_can_be_dumped(tmp_path: Path) -> None:
    with started([*LOCKSTEP, "run", "-n", "1", script(tmp_path, SLEEPER)], tmp_path) as agent:
        wait_for(lambda: len(pids(tmp_path)) == 1, 30, "the rank started")
        os.kill(pids(tmp_path)[0], STACK_DUMP_SIGNAL)
        assert agent.stderr is not None
        lines = [agent.stderr.readline() for _ in range(6)]
        assert "most recent call first" in lines[0]
        assert any("script.py" in line for line in lines), "the main thread comes last"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise ValueError('x' * 2_000_000)", "the cause: ValueError: xxx"),
        ("import os; del os.environ['WORLD_SIZE']; raise ValueError('late')", "the cause: ValueError: late"),
        ("import asyncio; raise asyncio.CancelledError('late')", "the cause: asyncio.exceptions.CancelledError: late"),
        (
            "class Odd(Exception):\n    def __str__(self): raise KeyError\nraise Odd",
            "the cause: Odd: <exception str() failed>",
        ),
    ],
)
def test_the_error_of_a_failure_is_not_lost(tmp_path: Path, text: str, words: str) -> None:
    finished = run([*TWO, script(tmp_path, text)], tmp_path)
    assert finished.code == 3
    assert words in finished.err.splitlines()[0]


@pytest.mark.slow
def test_the_agents_of_two_machines_blame_the_right_rank(tmp_path: Path) -> None:
    meet = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    agent = [*LOCKSTEP, "run", "-n", "1", *meet]
    actor = [script(tmp_path, ACTOR), json.dumps({"1": "raise"})]
    with started([*agent, "--node-rank", "0", *actor], tmp_path) as first:
        second = run([*agent, "--node-rank", "1", *actor], tmp_path)
        _, err = first.communicate(timeout=60)
    assert f"rank 1 of 2 on {HOST} failed, the cause: ValueError: planted" in second.err
    assert err == "lockstep: rank 0 of 2: victims of a rank on another machine; see its output\n"
    assert (first.returncode, second.code) == (3, 3)


def test_no_rank_outlives_a_killed_launcher_by_more_than_two_seconds(tmp_path: Path) -> None:
    with started([*TWO, script(tmp_path, SLEEPER)], tmp_path) as agent:
        wait_for(lambda: len(pids(tmp_path)) == 2, 30, "both ranks started")
        agent.kill()
        wait_for(lambda: not any(map(is_running, pids(tmp_path))), 2, "no rank is left")


def test_no_data_worker_outlives_a_killed_launcher_by_more_than_two_seconds(tmp_path: Path) -> None:
    with started([*LOCKSTEP, "run", "-n", "1", script(tmp_path, LOADER)], tmp_path) as agent:
        wait_for(lambda: len(pids(tmp_path, "data-*.pid")) == 1, 30, "the data worker started")
        workers = pids(tmp_path, "data-*.pid")
        agent.kill()
        wait_for(lambda: not any(map(is_running, workers)), 2, "no data worker is left")


def test_all_errors_in_a_config_are_reported_before_any_process_starts(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("recipe: digits\nepochs: none\noptim: {lrr: 1}\nbatch: {global: 64}\n")
    finished = call(["train", "bad.yaml", "-n", "2", "model.depth=2"], tmp_path)
    assert finished.code == 2
    lines = finished.err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("lockstep: ") for line in lines)
    assert "did you mean optim.lr?" in finished.err
    assert [path.name for path in tmp_path.iterdir()] == ["bad.yaml"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["train", "no-such-recipe"],
            f"neither a file nor a built-in recipe ({RECIPES})",
        ),
        (["train", "missing.yaml"], "missing.yaml"),
        (
            ["train", "digits", "-n", "two"],
            "-n two: expected a whole number, auto, or a minimum and a maximum",
        ),
        (["run", "-n", "2", "missing.py"], "missing.py: no such script"),
        (["run", "missing.py"], "missing.py: no such script"),
        (["run", "--nnodes", "2", "missing.py"], "--nnodes 2 needs -n"),
        (["train", "digits", "recipe=json:loads"], "json:loads is not a recipe"),
        (
            ["train", "digits", "recipe=:x"],
            f"expected {RECIPES} or package.module:name",
        ),
        (["train", "digits", "--max-restarts", "2"], "--max-restarts 2 needs -n"),
        (["train", "digits", "--on-hang", "stop"], "--on-hang stop needs -n"),
        (["train", "digits", "device=mps"], "no MPS device"),
        (["train", "digits", "batch.global=5000"], "larger than the training data set"),
    ],
)
def test_other_mistakes_are_one_line(tmp_path: Path, arguments: list[str], words: str) -> None:
    finished = call(arguments, tmp_path)
    assert finished.code == 2
    assert len(finished.err.splitlines()) == 1
    assert words in finished.err
    assert not (tmp_path / "runs").exists(), "a mistake leaves no trace: the corrected command can use the folder"


def test_the_configs_settings_reach_the_job(tmp_path: Path) -> None:
    port = free_port()
    alone = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    timeout = run([*LOCKSTEP, "train", "digits", "timeout_s=0.5"], tmp_path, alone)
    assert timeout.code == 2
    assert f"rank 1 cannot reach the job's store at 127.0.0.1:{port}" in timeout.err
    assert "within 0.5 s" in timeout.err
    backend = run([*LOCKSTEP, "train", "digits", "device=cpu", "ddp_backend=nccl"], tmp_path, alone)
    assert backend.code == 2
    assert "backend='nccl'" in backend.err
    threads = run([*LOCKSTEP, "train", "digits", "steps=1", "threads=3"], tmp_path)
    assert threads.code == 0, threads.err
    assert json.loads((tmp_path / "runs" / "digits" / "run.json").read_text())["fingerprint"]["threads"] == 3


def test_a_users_recipe_is_found_beside_its_config(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from lockstep.recipes.digits.recipe import DigitsRecipe\nclass Mine(DigitsRecipe): pass\nrecipe = Mine\n"
    )
    (tmp_path / "mine.yaml").write_text("base: digits\nrecipe: mine:recipe\n")
    lockstep = str(BIN / "lockstep")
    finished = run([lockstep, "train", "mine.yaml", "--quick"], tmp_path)
    assert finished.code == 0, finished.err
    assert finished.out.startswith("mine:recipe: ")
    (tmp_path / "mine.py").write_text("def broken(:\n")
    broken = run([lockstep, "train", "mine.yaml", "--run", "b"], tmp_path)
    assert broken.code == 2
    assert "recipe: mine:recipe: SyntaxError" in broken.err
    assert len(broken.err.splitlines()) == 1


def test_the_traceback_of_a_users_recipe_begins_with_lockstep_s_trainer(tmp_path: Path) -> None:
    """Without the frames of the command line and of its library, which would push the cause off the screen."""
    (tmp_path / "mine.py").write_text(
        "from lockstep.recipes.digits.recipe import DigitsRecipe\n"
        "class Mine(DigitsRecipe):\n    def model(self, config): raise ValueError('planted')\nrecipe = Mine\n"
    )
    (tmp_path / "mine.yaml").write_text("base: digits\nrecipe: mine:recipe\n")
    finished = run([*LOCKSTEP, "train", "mine.yaml", "-n", "2", "--max-restarts", "0"], tmp_path)
    assert finished.code == 3
    _, _, trace = finished.err.partition("Traceback (most recent call last):\n")
    assert "recipes/registry.py" in trace.splitlines()[0], finished.err
    assert "ValueError: planted" in trace


@pytest.mark.slow
def test_a_folder_with_the_name_of_a_recipe_does_not_hide_it(tmp_path: Path) -> None:
    (tmp_path / "digits").mkdir()
    finished = run([*LOCKSTEP, "train", "digits", "--quick"], tmp_path)
    assert finished.code == 0, finished.err


@pytest.mark.slow
def test_output_closed_early_does_not_stop_training(tmp_path: Path) -> None:
    command = " ".join([*LOCKSTEP, "train", "digits", "--quick", "-n", "2"])
    finished = run(["bash", "-c", f"set -o pipefail; {command} | head -1"], tmp_path)
    assert finished.code == 0, finished.err
    assert (tmp_path / "runs" / "digits-quick" / "checkpoints" / "LATEST").exists()


def test_contradictory_variables_are_one_line(tmp_path: Path) -> None:
    finished = call(["train", "digits"], tmp_path, {"RANK": "3", "WORLD_SIZE": "2"})
    assert finished.code == 2
    assert finished.err == "lockstep: RANK=3 but WORLD_SIZE=2: ranks go from 0 to 1\n"


def test_a_script_that_never_imports_lockstep_is_launched_the_same_way(tmp_path: Path) -> None:
    text = """
import os, sys
print(sys.executable, os.environ["OMP_NUM_THREADS"], os.environ["GLOO_SOCKET_IFNAME"], sys.argv, sys.path[0])
"""
    finished = run([*TWO, script(tmp_path, text), "--flag"], tmp_path)
    assert finished.out.splitlines() == [f"{sys.executable} 1 lo ['script.py', '--flag'] {tmp_path}"] * 2
    three_threads = run([*TWO, "script.py"], tmp_path, {"OMP_NUM_THREADS": "3"})
    assert three_threads.out.count(" 3 ") == 2


def test_a_script_ends_as_under_python(tmp_path: Path) -> None:
    text = """
import atexit, sys, threading, time
atexit.register(lambda: sys.stdout.write("at exit "))
threading.Thread(target=lambda: (time.sleep(0.3), sys.stdout.write("thread "))).start()
sys.stdout.write("main ")
sys.exit("complaint")
"""
    finished = run([*LOCKSTEP, "run", "-n", "1", script(tmp_path, text)], tmp_path)
    assert finished.out == "main thread at exit "
    assert finished.err.splitlines() == [
        "complaint",
        f"lockstep: rank 0 of 1 on {HOST} failed, the cause: exited with code 1",
    ]
