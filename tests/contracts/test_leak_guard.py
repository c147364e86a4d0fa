"""The leak guard, run on a separate test file: every kind of leak fails the test that leaks, and no other."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

CHECKOUT = Path(__file__).parents[2]
SHARED_FILE = Path(f"/dev/shm/lockstep-leak-{os.getpid()}")
SEMAPHORE = Path(f"/dev/shm/sem.mp-{os.getpid()}")
UNFINISHED_SEMAPHORE = Path(f"/dev/shm/sem.{os.getpid() % 10**6:06}")

LEAKING_TESTS = '''
import os, subprocess, sys, threading, time
from pathlib import Path

def test_clean(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FOR_THIS_TEST", "1")
    Path("output").touch()
    subprocess.run([sys.executable, "-c", ""])
    threading.Thread(target=time.sleep, args=[0.1]).start()  # gone within the grace

def test_running_things():
    parent = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE)
    Path(os.environ["PIDS"]).write_text(f"{parent.pid} {int(parent.stdout.readline())}")
    threading.Thread(target=time.sleep, args=[5], name="lingering", daemon=True).start()
    Path(os.environ["SHARED_FILE"]).touch()

def test_shared_memory_of_another_session():
    # It forks and ends, so that the owner of the file is no descendant of this session.
    program = f"""if True:
        import mmap, os, time
        file = open({os.environ["SHARED_FILE"] + "-of-another"!r}, "wb+")
        file.truncate(4096)
        page = mmap.mmap(file.fileno(), 4096)
        if os.fork() == 0:
            time.sleep(2)
            os.unlink(file.name)
        """
    subprocess.run([sys.executable, "-c", program], check=True)

def test_semaphore():
    Path(os.environ["SEMAPHORE"]).touch()

def test_semaphore_of_a_process_that_was_killed():
    Path(os.environ["UNFINISHED_SEMAPHORE"]).touch()

def test_variable_set():
    os.environ["SET_BY_TEST"] = "1"

def test_variable_removed():
    del os.environ["SET_BEFORE"]

def test_variables_are_put_back():
    assert os.environ["SET_BEFORE"] == "1" and "SET_BY_TEST" not in os.environ

def test_file():
    Path("forgotten").touch()

def test_run_folder():
    Path("runs/demo").mkdir(parents=True)

def test_second_run_folder():
    Path("runs/again").mkdir()

def test_working_directory():
    os.chdir("/")

def test_working_directory_is_put_back():
    assert Path("forgotten").exists()

def test_folders_of_tools():
    for name in (".git", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".venv", "__pycache__"):
        Path(name).mkdir(exist_ok=True)
    Path(".coverage.1").touch()
'''

LEAKS = {
    "test_running_things": [": sleep 60", "thread 'lingering' (daemon)", str(SHARED_FILE)],
    "test_semaphore": [str(SEMAPHORE)],
    "test_variable_set": ["environment variable SET_BY_TEST"],
    "test_variable_removed": ["environment variable SET_BEFORE"],
    "test_file": ["forgotten"],
    "test_run_folder": ["runs/demo"],
    "test_second_run_folder": ["runs/again"],
    "test_working_directory": ["working directory /"],
}
CLEAN = [
    "test_clean",
    "test_shared_memory_of_another_session",
    "test_semaphore_of_a_process_that_was_killed",
    "test_variables_are_put_back",
    "test_working_directory_is_put_back",
    "test_folders_of_tools",
]


@pytest.fixture(scope="module")
def pids_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pids") / "pids"


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory, pids_file: Path) -> Iterator[dict[str, list[str]]]:
    """Return what the guard said about each test of an inner session."""
    folder = tmp_path_factory.mktemp("inner")
    (folder / "test_leaking.py").write_text(LEAKING_TESTS)
    report = pids_file.with_name("report.xml")
    environment = {
        **os.environ,
        "PYTHONPATH": str(CHECKOUT),
        "SET_BEFORE": "1",
        "PIDS": str(pids_file),
        "SHARED_FILE": str(SHARED_FILE),
        "SEMAPHORE": str(SEMAPHORE),
        "UNFINISHED_SEMAPHORE": str(UNFINISHED_SEMAPHORE),
    }
    command = [sys.executable, "-m", "pytest", "-p", "tests.leaks", "--rootdir", str(folder), f"--junitxml={report}"]
    subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, timeout=60)
    heard: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        heard.setdefault(case.attrib["name"], []).extend(complaint.attrib["message"] for complaint in case)
    yield heard
    SHARED_FILE.unlink(missing_ok=True)
    SEMAPHORE.unlink(missing_ok=True)
    UNFINISHED_SEMAPHORE.unlink(missing_ok=True)


def test_every_inner_test_ran(complaints: dict[str, list[str]]) -> None:
    assert complaints.keys() == {*LEAKS, *CLEAN}


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_fails_its_test_and_is_named(name: str, complaints: dict[str, list[str]]) -> None:
    [complaint] = complaints[name]
    assert "the test left behind" in complaint
    assert [leak for leak in LEAKS[name] if leak not in complaint] == []


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_test_passes_even_after_a_leak(name: str, complaints: dict[str, list[str]]) -> None:
    assert complaints[name] == []


def test_leaked_processes_are_killed_with_their_children(complaints: dict[str, list[str]], pids_file: Path) -> None:
    pids = [int(word) for word in pids_file.read_text().split()]
    assert len(pids) == 2
    for pid in pids:
        assert f"process {pid}: " in complaints["test_running_things"][0]
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
