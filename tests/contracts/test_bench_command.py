"""`lockstep bench`, through the real command."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
import torch

from lockstep.bench import bench_command
from lockstep.bench.bench_record import BenchRecord, BenchTask, BenchTimes
from lockstep.bench.contenders import make_contenders
from tests.commands import LOCKSTEP, call, descendants, run, started, wait_for

BROKEN_ACCELERATE = 'raise ImportError("no luck with this one")'

# Works on one process, and takes one of two with it.
BROKEN_FABRIC = """
import os

class Fabric:
    def __init__(self, strategy, **_):
        if strategy == "ddp" and os.environ["RANK"] == "1":
            os._exit(7)

    def launch(self): ...
    def seed_everything(self, *_, **__): ...
    def setup(self, model, optimizer): return model, optimizer
    def setup_dataloaders(self, loader): return loader
    def backward(self, loss): loss.backward()
"""


def test_one_process_and_two_are_timed_and_compared_and_no_file_is_left(tmp_path: Path) -> None:
    command = [*LOCKSTEP, "bench", "tiny", "-n", "2", "--rounds", "2", "--steps", "5", "--json"]
    finished = run([*command, "--against", "lockstep,fast,fabric"], tmp_path, {"TMPDIR": str(tmp_path)})
    assert finished.code == 0, finished.err
    found = json.loads(finished.out)
    assert found["promise_kept"] is True
    assert (found["model"], found["processes"], found["steps"], found["rounds"]) == ("tiny", 2, 5, 2)
    rows = {row["name"]: row for row in found["rows"]}
    assert rows.keys() - {"fabric"} == {"hand-written", "again", "lockstep-1", "lockstep-2", "lockstep-8", "fast"}
    assert found["not_installed"] == ([] if "fabric" in rows else ["fabric"])
    for name, row in rows.items():
        assert row["failure"] is None
        assert list(row["times"]) == (["1"] if name == "lockstep-1" else ["1", "2"])
        assert all(len(time["seconds"]) == 2 and time["step_s"] > 0 for time in row["times"].values())
    for name in ("lockstep-2", "lockstep-8"):
        one, two = rows[name]["digests"]
        assert one == two
        assert (rows[name]["same_bits"], rows[name]["difference"]) == (True, 0.0)
    assert rows["lockstep-2"]["digests"] != rows["lockstep-8"]["digests"], "the number of lanes changes the result"
    assert rows["hand-written"]["same_bits"] is False
    assert 0.0 < rows["hand-written"]["difference"] < 1.0
    assert rows["hand-written"]["digests"] == rows["again"]["digests"]
    assert rows["hand-written"]["times"]["1"]["median"] == 1.0
    assert [line.split(",")[0] for line in found["verdict"][:2]] == ["On one process", "On 2 processes"]
    assert not any(tmp_path.glob("lockstep-*")), "nothing is left behind"


def test_errors_are_one_line(tmp_path: Path) -> None:
    for arguments, words in [
        (["big"], "lockstep bench has no model big: expected mlp, tiny, conv, gpt"),
        (
            ["--against", "lockstep,apex"],
            "--against apex: expected names from lockstep, fast, dataloader, accelerate, fabric",
        ),
        (["--lanes", "2", "-n", "4"], "4 processes cannot share lanes=2"),
        (["-n", "3", "--batch", "64"], "--batch 64: expected a multiple of 12, for 3 processes and their lanes"),
        (["--device", "tpu"], "--device tpu: expected cpu or cuda"),
    ]:
        finished = call(["bench", *arguments], tmp_path)
        assert finished.code == 2
        (line,) = finished.err.splitlines()
        assert words in line


def test_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {
        "hand-written": [0.001, 0.002, 0.004],
        "again": [0.001, 0.002, 0.004],
        "lockstep-2": [0.002, 0.006, 0.010],
    }

    def measure(task: BenchTask, processes: int, folder: Path, failures: dict[str, str], *, quiet: bool) -> BenchRecord:
        place = folder / str(processes)
        place.mkdir()
        record = BenchRecord(place)
        able = {"lockstep-1": seconds["again"]} if processes == 1 else {}
        record.write_times(BenchTimes(12345, {**seconds, **able}))
        for name in [*seconds, *able]:
            off = 0.5 if processes > 1 and name != "lockstep-2" else 0.0
            record.write_weights(name, {"weight": torch.full((2,), 1.0 + off)})
        failures["accelerate"] = "ImportError: no"
        return record

    monkeypatch.setattr(bench_command, "measure", measure)
    monkeypatch.setattr(bench_command, "_capacity", lambda _: bench_command._Capacity(8, "cores"))
    task = BenchTask("tiny", "cpu", 32, 5, 3, make_contenders(["lockstep", "accelerate"], {}, [1, 2]), "")
    assert bench_command._bench(task, 2, ["fabric"], as_json=False) == 0
    first, about, heading, *rows, _, _, _ = capsys.readouterr().out.splitlines()
    assert first == "Fabric is not installed, so it is not measured (pip install lightning)"
    assert about == "tiny, 12,345 parameters, batch 32, cpu, one thread a process"
    assert heading.split("  ")[-1] == "weights after 5 steps"
    assert [" ".join(row.split()) for row in rows] == [
        "hand-written (DDP on several) 2.00 ms ×1.00 2.00 ms ×1.00 0.5 apart",
        "the same again 2.00 ms ×1.00 (1.00–1.00) 2.00 ms ×1.00 (1.00–1.00) 0.5 apart",
        "lockstep, 1 lane 2.00 ms ×1.00 (1.00–1.00) –",
        "lockstep, 2 lanes 6.00 ms ×2.50 (2.00–3.00) 6.00 ms ×2.50 (2.00–3.00) the same bits",
        "Accelerate failed failed",
        "Accelerate failed: ImportError: no",
    ]


@pytest.mark.slow
def test_a_contender_that_fails_is_reported_and_the_others_continue(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "peers" / "lightning").mkdir(parents=True)
    (tmp_path / "peers" / "accelerate.py").write_text(BROKEN_ACCELERATE)
    (tmp_path / "peers" / "lightning" / "__init__.py").write_text("")
    (tmp_path / "peers" / "lightning" / "fabric.py").write_text(BROKEN_FABRIC)
    finished = run(
        [*LOCKSTEP, "bench", "tiny", "--rounds", "2", "--steps", "5", "--against", "lockstep,accelerate,fabric"],
        tmp_path / "here",
        {"PYTHONPATH": f"{tmp_path / 'peers'}:{os.environ.get('PYTHONPATH', '')}", "TMPDIR": str(tmp_path / "here")},
    )
    assert finished.code == 0, finished.err
    lines = finished.out.splitlines()
    assert lines.count("Accelerate failed: starting again without it") == 1, "it is not tried again on two"
    assert lines.count("Fabric failed: starting again without it") == 1
    rows = {line[:12].strip(): line[12:].split() for line in lines if "failed:" not in line}
    assert rows["Accelerate"] == ["failed", "failed"]
    assert rows["Fabric"][1] == "ms"
    assert rows["Fabric"][-1] == "failed"
    assert "Accelerate failed: ImportError: no luck with this one" in lines
    assert any(line.startswith("Fabric failed: ") and "7" in line for line in lines), "by which exit code"
    assert lines[-1].startswith("On one process and on 2, lockstep computes the same bits; hand-written, the weights")
    assert not any((tmp_path / "here").glob("lockstep-*"))


@pytest.mark.slow
def test_a_stop_ends_all_processes(tmp_path: Path) -> None:
    command = [*LOCKSTEP, "bench", "tiny", "--rounds", "2", "--steps", "150", "--against", "fast"]
    with started(command, tmp_path, {"TMPDIR": str(tmp_path)}) as process:
        wait_for(lambda: any(tmp_path.glob("lockstep-bench-*/2-0/turn")), 60, "two processes are measured")
        children = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert children
        assert not [child for child in children if psutil.pid_exists(child.pid)], "no process is left"
    assert process.returncode == 128 + signal.SIGINT
    assert not any(tmp_path.glob("lockstep-*"))
