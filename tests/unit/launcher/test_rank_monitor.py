"""What the agent reads of its ranks' files."""

import os
from pathlib import Path
from typing import Any

import pytest

from lockstep.events.run_folder import RunFolder, ScriptSettings
from lockstep.launcher.rank_monitor import RankMonitor
from lockstep.supervision.agent_folder import RankFiles
from lockstep.train.run_log import RunLog
from lockstep.world.world import World


@pytest.mark.parametrize("name", [b"run", b"r\xff"])
def test_the_run_folder_of_a_rank_may_have_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: bytes
) -> None:
    """Also one that is not text, which Linux allows."""
    processes: Any = None
    monitor = RankMonitor(tmp_path, processes, [0])
    assert monitor.run_folder() is None
    monkeypatch.setattr(RankFiles, "own", lambda: RankFiles(tmp_path, 0))
    monkeypatch.setattr("lockstep.train.run_log.title_rank", lambda *_: None)
    folder = tmp_path / os.fsdecode(name)
    log = RunLog(RunFolder(folder), World(), [], trace=None)
    log.open(ScriptSettings({}), {})
    log.close()
    assert monitor.run_folder() == folder
