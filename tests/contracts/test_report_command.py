"""`lockstep report` and `lockstep watch` on a real run of two processes, one of them slow: it is named, live and
afterwards, and watching changes nothing in the folder."""

import http.client
import json
import re
import signal
from pathlib import Path
from typing import Any

from tests.commands import LOCKSTEP, call, run, started
from tests.run_folders import finished_run, start, write_run

SCRIPT = """
import sys, time
import torch, torch.nn.functional as F, lockstep


def main(world):
    def loss(model, batch):
        x, y = batch
        time.sleep(0.03 * world.rank)  # rank 1 is the slow one
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)

    run = lockstep.Run("runs/mine", world, seed=7, log_every=2)
    model = run.prepare(torch.nn.Linear(8, 3))
    optimizer = run.optimizer(model, lambda params: torch.optim.AdamW(params, lr=3e-3))
    data = torch.utils.data.TensorDataset(torch.randn(512, 8), torch.randint(0, 3, (512,)))
    for step in run.steps(run.loader(data, global_batch=64, lanes=4), epochs=8):
        step.accumulate(loss, model)
        step.update(optimizer)
        run.log(loss=step.loss)


if __name__ == "__main__":
    lockstep.launch(main)
"""


def test_a_slow_rank_is_named_while_it_trains_and_afterwards(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SCRIPT)
    folder = tmp_path / "runs" / "mine"
    with started([*LOCKSTEP, "watch", "runs/mine", "--web"], tmp_path) as watching:
        assert watching.stdout is not None
        port, token = re.search(r"http://127\.0\.0\.1:(\d+)/(.+)/;", watching.stdout.readline()).groups()  # type: ignore[union-attr]
        with started([*LOCKSTEP, "run", "-n", "2", "slow.py"], tmp_path) as training:
            seen = follow_until_the_end(int(port), token)
            out, err = training.communicate(timeout=60)
            assert training.returncode == 0, err
        watching.send_signal(signal.SIGTERM)
        assert watching.wait(timeout=20) == 0
    assert "waiting for" in seen[0]
    running = [page for page in seen if "running (process" in page]
    assert any("rank 1 is slow: its forward and backward pass takes" in page for page in running), seen[-1][:2000]
    assert 'aria-label="Loss"' in seen[-1]

    before = contents(folder)
    finished = run([*LOCKSTEP, "report", "runs/mine", "--json", "-o", "page.html"], tmp_path)
    assert finished.code == 0, finished.err
    (report,) = json.loads(finished.out)["runs"]
    assert (report["straggler"]["rank"], report["straggler"]["phase"]) == (1, "compute")
    assert report["straggler"]["held_up_s"] > 0.03  # two lanes of 0.03 s each, and much less on rank 0
    assert [times["num_lanes"] for times in report["times"]] == [2, 2]
    assert all(times["sent_bytes"] > 0 and times["travel_s"] > 0 for times in report["times"])
    waited, worked = ([times["phases"][phase] for times in report["times"]] for phase in ("exchange", "compute"))
    assert waited[0] > waited[1] and worked[0] < worked[1]
    assert report["digest"] in out
    assert (report["state"], report["step"]) == ("ended", 64)
    assert "rank 1 is slow" in (tmp_path / "page.html").read_text()
    finished = run([*LOCKSTEP, "watch", "runs/mine"], tmp_path)
    assert (finished.code, finished.out.startswith("finished after step 64 of 64")) == (0, True)
    assert contents(folder) == before


def follow_until_the_end(port: int, token: str) -> list[str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", f"/{token}/follow")
    answer = connection.getresponse()
    pages: list[str] = []
    while not pages or "state ended" not in pages[-1]:
        line = answer.readline()
        assert line, "the server has stopped"
        if line.startswith(b"data: "):
            pages.append(json.loads(line.removeprefix(b"data: ")))
    connection.close()
    return pages


def contents(folder: Path) -> dict[str, Any]:
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def test_the_page_is_written_to_the_folder_and_errors_are_one_line(tmp_path: Path) -> None:
    finished_run(tmp_path / "one", 1)
    finished_run(tmp_path / "two", 2, speed=1.9)
    write_run(tmp_path / "left", [start()])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("not a run")

    finished = call(["report", "one"], tmp_path)
    assert (finished.code, finished.out.splitlines()[-1]) == (0, "page: one/report.html")
    assert "<figure" in (tmp_path / "one" / "report.html").read_text()
    finished = call(["report", "two", "one", "-o", "both.html"], tmp_path)
    assert finished.code == 0
    assert "×1.90" in finished.out and "digests: equal" in finished.out
    assert "Speed-up" in (tmp_path / "both.html").read_text()
    finished = call(["watch", "left", "--patience", "0"], tmp_path)
    assert (finished.code, finished.out.startswith("not running, not finished")) == (75, True)
    for command, message in (
        (["report", "other"], "lockstep: other is not a run folder: it has no run.json\n"),
        (["report", "one", "-o", "train.py"], "lockstep: -o train.py: expected a file name that ends in .html\n"),
        (["watch", "nowhere", "--once"], "lockstep: nowhere does not exist: omit --once to wait for it\n"),
    ):
        finished = call(command, tmp_path)
        assert (finished.code, finished.err) == (2, message)
