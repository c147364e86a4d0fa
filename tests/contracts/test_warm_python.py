"""Processes forked from the warm server behave as those that `subprocess.Popen` starts."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.commands import LOCKSTEP, Finished, clean_environment, is_running, run, started, wait_for
from tests.warm_python import WarmProcess, WarmPython, has_usual_imports


def both(folder: Path, text: str, *arguments: str, env: dict[str, str] | None = None) -> Finished:
    """What a script does in a warm process; it has done the same in a cold one."""
    (folder / "script.py").write_text(text)
    command = [sys.executable, "script.py", *arguments]
    warm, cold = run(command, folder, env), run(command, folder, env, cold=True)
    assert warm == cold
    return warm


def test_scripts_start_warm_and_cold_on_request(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print('torch' in sys.modules)")
    command = [sys.executable, "script.py"]
    assert run(command, tmp_path).out == "True\n"
    assert run(command, tmp_path, cold=True).out == "False\n"
    assert run(command, tmp_path, {"OMP_NUM_THREADS": "1"}).out == "False\n", "libraries read it when imported"


@pytest.mark.parametrize(
    "end",
    [
        "",
        "sys.exit(7)",
        "sys.exit('why')",
        "1 / 0",
        "os._exit(3)",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "os.abort()",
        "atexit.register(print, 'at exit')",
        "sys.excepthook = lambda *error: print(error[1]); raise ValueError('seen')",
        "threading.Thread(target=lambda: (time.sleep(0.1), print('last'))).start()",
    ],
)
def test_ends(end: str, tmp_path: Path) -> None:
    both(tmp_path, f"import atexit, os, signal, sys, threading, time\nprint('out', flush=True)\n{end}\n")


def test_an_interrupt_ends_it_by_the_signal(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)")
    with started([sys.executable, "script.py"], tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in process.communicate(timeout=30)[1]
        assert process.returncode == -signal.SIGINT


def test_arguments_environment_folder_and_paths(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("")
    text = """
import beside, os, sys
print(sys.argv, os.environ["PLANTED"], "HOME_OF_NOBODY" in os.environ, os.getcwd(), sys.path[0], sys.stdin.read())
print(__name__, __file__, __spec__, sys.modules["__main__"].os is os, sorted(globals()))
print(sys.stdout.isatty(), sys.stdout.line_buffering, len(os.environ))
"""
    finished = both(tmp_path, text, "one", "two words", env={"PLANTED": "here"})
    assert finished.code == 0, finished.err
    assert "['script.py', 'one', 'two words'] here False" in finished.out


def test_a_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lockstep", "train", "nothing"]
    warm, cold = run(command, tmp_path), run(command, tmp_path, cold=True)
    assert warm == cold
    assert warm.code == 2


def test_output_is_complete_and_that_of_children_too(tmp_path: Path) -> None:
    text = """
import subprocess, sys
for number in range(20000):
    print(number, file=sys.stderr if number % 2 else sys.stdout)
sys.stdout.flush()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3); print('a child')"])
"""
    finished = both(tmp_path, text)
    assert finished.out.splitlines() == [*map(str, range(0, 20000, 2)), "a child"]
    assert finished.err.splitlines() == list(map(str, range(1, 20000, 2)))


def test_processes_of_a_pool_import_the_script(tmp_path: Path) -> None:
    text = """
import multiprocessing
def double(value):
    return 2 * value
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [1, 2]))
"""
    assert both(tmp_path, text).out == "[2, 4]\n"


def test_a_timeout_takes_all_its_processes(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("""
import pathlib, subprocess
pathlib.Path("pid").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
print("begun", flush=True)
subprocess.Popen(["sleep", "600"]).wait()
""")
    with pytest.raises(subprocess.TimeoutExpired), started([sys.executable, "script.py"], tmp_path) as process:
        wait_for(lambda: (tmp_path / "pid").exists(), 30, "started")
        try:
            process.communicate(timeout=0.2)
        finally:
            assert process.poll() is None
    assert not is_running(int((tmp_path / "pid").read_text()))
    assert process.returncode == -signal.SIGKILL
    assert process.communicate()[0] == "begun\n", "what was read before the timeout is kept"


def test_each_process_draws_its_own_random_numbers(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import numpy, random; print(numpy.random.rand(), random.random())")
    first, second = (run([sys.executable, "script.py"], tmp_path).out.split() for _ in range(2))
    assert first[0] != second[0]
    assert first[1] != second[1]


@pytest.fixture
def own_server() -> Iterator[WarmPython]:
    server = WarmPython()
    yield server
    server.close()


def test_several_at_a_time_and_a_closed_server_leaves_none(tmp_path: Path, own_server: WarmPython) -> None:
    (tmp_path / "script.py").write_text("import sys, time; time.sleep(float(sys.argv[1])); sys.exit(int(sys.argv[2]))")

    def start(seconds: str, code: str) -> WarmProcess:
        return own_server.start(["script.py", seconds, code], tmp_path, {})

    slow, fast, endless = start("0.3", "4"), start("0", "5"), start("600", "0")
    assert (slow.wait(30), fast.wait(30), endless.poll()) == (4, 5, None)
    own_server.close()
    wait_for(lambda: not is_running(endless.pid), 30, "killed")
    for process in (slow, fast, endless):
        process.stdout.close()
        process.stderr.close()


def test_variables_read_at_import_need_a_cold_process() -> None:
    usual = clean_environment()
    assert has_usual_imports(usual | {"HOME": "/nowhere", "LOCKSTEP_MEMORY": "/nowhere"})
    assert not has_usual_imports(usual | {"PYTHONPATH": "/nowhere"})


def test_several_threads_may_start_processes(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import sys, time; time.sleep(0.1); print(sys.argv[1]); sys.exit(int(sys.argv[1]))"
    )
    numbers = list(range(12))
    with ThreadPoolExecutor(6) as threads:
        finished = list(threads.map(lambda n: run([sys.executable, "script.py", str(n)], tmp_path), numbers))
    assert [(each.code, each.out) for each in finished] == [(number, f"{number}\n") for number in numbers]


RANK_AT_START = """
import logging, os, sys, threading, torch
signals = [line for line in open("/proc/self/status") if line.startswith("Sig") and "SigQ" not in line]
descriptors = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd") if int(number) > 2]
print(sys.argv, os.getcwd(), torch.get_num_threads(), threading.active_count(), logging.getLogger("lockstep").handlers)
files = [os.path.basename(os.readlink(path)) for path in descriptors if os.path.exists(path)]
print(sorted(name.split(":")[0] for name in files), signals)
print(sorted(os.environ), os.environ["OMP_NUM_THREADS"])
"""


def test_ranks_of_a_warm_agent_start_as_those_of_a_cold_one(tmp_path: Path) -> None:
    """Its fork server is a fork of the agent, of which the ranks must find nothing."""
    (tmp_path / "script.py").write_text(RANK_AT_START)
    command = [*LOCKSTEP, "run", "-n", "1", "script.py", "an argument"]
    warm, cold = run(command, tmp_path), run(command, tmp_path, cold=True)
    assert warm.code == 0, warm.err
    assert warm == cold
