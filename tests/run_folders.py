"""Write run folders as a run would, for tests that read them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RUN_INFO = {
    "format": 1,
    "run_id": "0123456789abcdef",
    "created": "2030-01-01T00:00:00Z",
    "fingerprint": {"torch": "2.13", "seed": 7},
}


def event(kind: str, step: int, *, t: float = 0.0, attempt: int = 1, **fields: Any) -> dict[str, Any]:
    return {"t": t or 1000.0 + step, "attempt": attempt, "step": step, "kind": kind, **fields}


def start(step: int = 0, *, attempt: int = 1, **fields: Any) -> dict[str, Any]:
    setup = {"processes": 2, "device": "cpu", "backend": "gloo", "effective_batch": 64, "lanes": 4, "precision": "fp32"}
    more = {"speed_up_bound": 2.0, "total_steps": 40, "parallel": "ddp", "parameters": 1234, "recipe": "digits"}
    return event("start", step, attempt=attempt, **{**setup, **more, **fields})


def timed(step: int, *, attempt: int = 1, **fields: Any) -> dict[str, Any]:
    """Return a timed step, as a rank writes it."""
    times = {"data_s": 0.01, "compute_s": 0.1, "exchange_s": 0.02, "update_s": 0.03, "rest_s": 0.0}
    others = {"saving_s": 0.0, "evaluating_s": 0.0, "elapsed_s": 1.6, "num_steps": 10, "num_lanes": 2}
    return event("step", step, attempt=attempt, **{**times, **others, **fields})


def write_run(
    folder: Path,
    events: Iterable[dict[str, Any]] = (),
    ranks: dict[int, Iterable[dict[str, Any]]] | None = None,
    config: str = "recipe: digits\n",
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(RUN_INFO))
    (folder / "config.yaml").write_text(config)
    (folder / "ranks").mkdir(exist_ok=True)
    append(folder / "events.jsonl", events)
    for rank, lines in (ranks or {}).items():
        append(folder / "ranks" / f"{rank}.jsonl", lines)
    return folder


def append(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def finished_run(folder: Path, processes: int = 2, *, digest: str = "ab" * 32, speed: float = 1.0) -> Path:
    """Write a run of forty steps, evaluated twice and saved once."""
    steps = range(10, 50, 10)
    events = [start(processes=processes, speed_up_bound=float(processes))]
    events += [event("step", step, loss=4.0 / step, lr=0.1, epoch=0, samples=64) for step in steps]
    events += [event("eval", step, metrics={"accuracy": step / 50}, epoch=step // 20) for step in (20, 40)]
    events += [
        event("checkpoint", 40, path="checkpoints/step-40", is_best=True, num_bytes=5000, stall_s=0.01, write_s=0.1),
        event("end", 40, digest=digest, metrics={"accuracy": 0.8}),
    ]
    lines = [timed(step, elapsed_s=1.6 / speed, travel_s=0.05, sent_bytes=4000) for step in steps]
    return write_run(folder, events, dict.fromkeys(range(processes), lines))


def search_run(folder: Path) -> Path:
    """Write a search over two generations of four designs, one of which failed in each."""
    setup = {"total_rounds": 2, "objectives": {"mass": "min", "grip": "max"}, "genes": 3, "population": 4}
    best = {"mass": 1.0, "grip": 5.0}
    events = [event("start", 0, processes=2, guided=True, **setup)]
    events += [
        event("step", number, generation=number, best=best, evaluated=4, evaluate_s=0.5, found=None)
        for number in (1, 2)
    ]
    write_run(folder, events)
    (folder / "evaluations").mkdir()
    for number in (0, 1):
        found = [[1.0 + number, 2.0], [3.0, 5.0 - number], "it failed", [2.0, 1.0]]
        append(folder / "evaluations" / "0.jsonl", [{"generation": number, "key": f"{number}", "evaluations": found}])
    return folder
