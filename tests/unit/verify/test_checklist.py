"""The checklist of a verification: the evidence for each line, and that each can fail."""

import json
import tempfile
from pathlib import Path

import pytest

from lockstep.supervision.io_recorder import OutputRecord
from lockstep.verify.checklist import check_metrics, check_who_printed, check_who_wrote
from lockstep.verify.inference_check import judge_inference


def records(folder: Path, *, printed: tuple[str, str] = ("", ""), written: tuple[list[Path], ...] = ([], [])) -> list:
    files = [OutputRecord(folder / "ranks" / "many-1", rank) for rank in range(2)]
    files[0].folder.mkdir(parents=True)
    for each, text, paths in zip(files, printed, written, strict=True):
        each.output.write_text(text)
        each.written.write_text("".join(json.dumps(str(path)) + "\n" for path in paths))
    return files


@pytest.mark.parametrize(
    ("printed", "holds", "evidence"),
    [
        (("step 1\nstep 2\n", ""), True, "rank 0 printed 2 lines, rank 1 nothing"),
        (("step 1\n", "[Gloo] Rank 1 is connected to 1 peer ranks\n\n"), True, "rank 0 printed 1 line, rank 1 nothing"),
        (("step 1\n", "step 1\n"), False, "rank 1 printed 1 line"),
        (("", ""), None, "nothing was printed"),
    ],
)
def test_only_rank_0_should_print(tmp_path: Path, printed: tuple[str, str], holds: bool | None, evidence: str) -> None:
    found = check_who_printed(records(tmp_path, printed=printed))
    assert (found.holds, found.evidence) == (holds, evidence)


def test_only_rank_0_should_write(tmp_path: Path) -> None:
    trial, here = tmp_path / "trial", tmp_path / "here"
    checkpoint, log = trial / "many" / "checkpoints" / "step-2", trial / "many" / "ranks" / "1.jsonl"
    ignored = [
        Path(tempfile.gettempdir()) / "x",
        here / "lockstep-agent-1" / "rank-1.end",
        here / "__pycache__" / "a.pyc",
        Path("/dev/shm/page"),
    ]
    good = check_who_wrote(records(trial, written=([checkpoint], [log, *ignored])), trial, here)
    assert good.holds
    assert good.evidence == "rank 0 wrote 1 file, rank 1 nothing but its own log"
    part = trial / "many" / "checkpoints" / ".draft-step-2-1-1" / "model.safetensors"
    (trial / "ranks" / "many-1" / "rank-1.written").write_text(json.dumps(str(part)) + "\n")
    shared = check_who_wrote([OutputRecord(trial / "ranks" / "many-1", rank) for rank in range(2)], trial, here)
    assert shared.evidence.endswith("rank 1 nothing but its part of a checkpoint, which rank 0 commits")
    elsewhere = trial / "many" / "ranks_mine" / "result.json"  # a script's run folder, ranks/mine
    for wrong, name in (
        (checkpoint, "many/checkpoints/step-2"),
        (elsewhere, "many/ranks_mine/result.json"),
        (here / "model.pt", "model.pt"),
    ):
        (trial / "ranks" / "many-1" / "rank-1.written").write_text(json.dumps(str(wrong)) + "\n")
        found = check_who_wrote([OutputRecord(trial / "ranks" / "many-1", rank) for rank in range(2)], trial, here)
        assert (found.holds, found.evidence) == (False, f"rank 1 wrote {name}")


def test_nothing_is_checked_if_nothing_was_written(tmp_path: Path) -> None:
    assert check_who_wrote(records(tmp_path), tmp_path, tmp_path).holds is None


def events(path: Path, **metrics: float) -> Path:
    path.write_text(json.dumps({"kind": "eval", "step": 4, "attempt": 1, "metrics": metrics}) + "\n")
    return path


def test_metrics(tmp_path: Path) -> None:
    one = events(tmp_path / "one", accuracy=0.5)
    same = check_metrics([one], [events(tmp_path / "same", accuracy=0.5)], [("1.5", "1.5")])
    assert (same.holds, same.evidence) == (True, "the loss of 1 step, accuracy 0.5 after step 4")
    other = events(tmp_path / "other", accuracy=0.25)
    assert check_metrics([one], [other], []).evidence == "step 4: {'accuracy': 0.5} and {'accuracy': 0.25}"
    assert check_metrics([one], [one], [("1.5", "1.25")]).holds is False
    assert check_metrics([tmp_path / "none"], [tmp_path / "none"], []).holds is None


def test_inference() -> None:
    many, other = {"loss": 1.5}, {"loss": 1.25}
    assert (
        judge_inference({"metrics": [many, other]}, recorded=many).evidence == "loss 1.5, as recorded by the run itself"
    )
    assert judge_inference({"metrics": [many, many]}, recorded=other).holds
    assert judge_inference({"metrics": [many, other]}, recorded=other).holds is False
    assert judge_inference({"why_not": "a search"}, recorded=None).holds is None
