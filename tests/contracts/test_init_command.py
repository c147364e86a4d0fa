"""`lockstep init`: what it writes runs as it stands, and nothing is written over."""

import re
from pathlib import Path

from tests.commands import LOCKSTEP, run


def test_the_script_it_writes_trains_alike_on_one_and_two_processes(tmp_path: Path) -> None:
    written = run([*LOCKSTEP, "init", "mine.py"], tmp_path)
    assert written.code == 0, written.err
    assert "lockstep run -n 2 mine.py" in (tmp_path / "mine.py").read_text()
    assert '"runs/mine"' in (tmp_path / "mine.py").read_text(), "two scripts of a folder do not share a run"
    digests = set()
    for number in ("1", "2"):
        finished = run([*LOCKSTEP, "run", "-n", number, "mine.py", "--epochs", "4", "--run", number], tmp_path)
        assert finished.code == 0, finished.err
        digests |= set(re.findall("digest ([0-9a-f]{64})", finished.out))
        assert float(re.findall(r"accuracy ([\d.]+)", finished.out)[-1]) > 0.8, "it learns"
    assert len(digests) == 1

    again = run([*LOCKSTEP, "init", "mine.py"], tmp_path)
    assert (again.code, again.err) == (2, "lockstep: mine.py exists: choose another name\n")
    nowhere = run([*LOCKSTEP, "init", "no/such/folder.py"], tmp_path)
    assert nowhere.code == 2
    assert "cannot be written: No such file or directory" in nowhere.err
