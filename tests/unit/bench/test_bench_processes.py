"""Starting the processes of a benchmark, and starting them again without a contender that fails."""

from pathlib import Path

import pytest

from lockstep.bench import bench_processes
from lockstep.bench.bench_processes import measure
from lockstep.bench.bench_record import BenchRecord, BenchTask
from lockstep.bench.contenders import HAND_WRITTEN, make_contenders
from lockstep.errors import LockstepError

DIED = "lockstep: rank 1 of 2 failed after step 3, the cause: killed by SIGKILL\nlockstep: its victims: rank 0\n"


def task(folder: Path) -> BenchTask:
    contenders = make_contenders(["lockstep", "fast", "dataloader"], {}, [1, 2])
    return BenchTask("tiny", "cpu", 32, 3, 2, contenders, str(folder))


def test_the_others_are_measured_without_a_contender_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[list[str]] = []

    def run(asked: BenchTask, processes: int, log: Path, *, quiet: bool) -> int:
        names = [each.name for each in asked.contenders]
        tried.append(names)
        record = BenchRecord(Path(asked.folder))
        for name in names:
            record.begin_turn(name)
            if name in ("dataloader", "fast"):
                log.write_text("some words\n" + DIED * (name == "dataloader"))
                return 3
        return 0

    monkeypatch.setattr(bench_processes, "_run", run)
    failures = {"lockstep-1": "known before"}
    measure(task(tmp_path), 1, tmp_path, failures, quiet=False)
    assert tried[-1] == ["hand-written", "again", "lockstep-2"]
    assert len(tried) == 3
    assert failures == {
        "lockstep-1": "known before",
        "dataloader": "killed by SIGKILL",
        "fast": "ended with exit code 3",
    }
    assert "hand-written, with a DataLoader failed: starting again without it" in capsys.readouterr().out
    tried.clear()
    measure(task(tmp_path), 2, tmp_path, failures, quiet=True)
    assert tried == [["hand-written", "again", "lockstep-2"]], "what failed on one process is not tried on two"


def test_nothing_can_be_measured_without_the_hand_written_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(asked: BenchTask, processes: int, log: Path, *, quiet: bool) -> int:
        BenchRecord(Path(asked.folder)).begin_turn(HAND_WRITTEN)
        log.write_text("the cause\n")
        return 3

    monkeypatch.setattr(bench_processes, "_run", run)
    with pytest.raises(LockstepError, match=r"nothing could be measured on 2 processes \(exit code 3\):\nthe cause"):
        measure(task(tmp_path), 2, tmp_path, {}, quiet=True)
