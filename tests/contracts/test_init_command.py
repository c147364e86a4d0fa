"""`lockstep init`: the script that it writes runs without changes, and no file is overwritten."""

import re
from pathlib import Path

from tests.commands import LOCKSTEP, call, run


def test_the_script_it_writes_trains_the_same_on_one_and_two_processes(tmp_path: Path) -> None:
    written = call(["init", "mine.py"], tmp_path)
    assert written.code == 0, written.err
    assert "lockstep run -n 2 mine.py" in (tmp_path / "mine.py").read_text()
    assert '"runs/mine"' in (tmp_path / "mine.py").read_text(), "two scripts in a folder must not share a run"
    digests = set()
    for number in ("1", "2"):
        finished = run([*LOCKSTEP, "run", "-n", number, "mine.py", "--epochs", "4", "--run", number], tmp_path)
        assert finished.code == 0, finished.err
        digests |= set(re.findall("digest ([0-9a-f]{64})", finished.out))
        assert float(re.findall(r"accuracy ([\d.]+)", finished.out)[-1]) > 0.8, "it learns"
    assert len(digests) == 1


def test_existing_files_and_missing_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("mine")
    again = call(["init", "mine.py"], tmp_path)
    assert (again.code, again.err) == (2, "lockstep: mine.py exists: choose another name\n")
    assert (tmp_path / "mine.py").read_text() == "mine"
    nowhere = call(["init", "no/such/folder.py"], tmp_path)
    assert nowhere.code == 2
    assert "cannot be written: No such file or directory" in nowhere.err
