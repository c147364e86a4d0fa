"""The process in which `lockstep verify` loads a checkpoint for inference, as somebody else would: alone.

Its argument says what to load, as JSON: it prints what comes out, as JSON.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import LockstepError
from lockstep.events.jsonl import read_lines
from lockstep.events.run_folder import RunFolder
from lockstep.launcher.worker import users_traceback
from lockstep.observe.verification.checklist import Check
from lockstep.observe.verification.verifier import INFERENCE

_MOST_SHOWN = 3


class Task(NamedTuple):
    config: str
    overrides: list[str]
    runs: list[str]


def inference_of(config: str, overrides: list[str]) -> Callable[[Path, Path], Check]:
    """The check, for the runs of one process and of several."""

    def check(one: Path, many: Path) -> Check:
        task = Task(config, overrides, [str(many), str(one)])
        command = [sys.executable, "-m", "lockstep.commands.inference_trial", json.dumps(task._asdict())]
        finished = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        answer = finished.stdout.splitlines()[-1:]
        if finished.returncode != 0 or not answer:
            return Check(
                INFERENCE, False, finished.stderr.strip()[-2000:] or "it ended without a word", is_promise=True
            )
        return judge(json.loads(answer[0]), recorded_metrics(many))

    return check


def judge(found: dict[str, Any], recorded: dict[str, Any] | None) -> Check:
    """`found`: the metrics from the checkpoint of several processes and of one; `recorded`: by the run itself."""
    if "why_not" in found:
        return Check(INFERENCE, None, found["why_not"])
    many, one = found["metrics"]
    shown = ", ".join(
        f"{name} {value:.6g}" for name, value in list(many.items())[:_MOST_SHOWN] if isinstance(value, float)
    )
    if many == recorded:
        return Check(INFERENCE, True, f"{shown}, as the run itself has recorded", is_promise=True)
    if many == one:
        return Check(INFERENCE, True, f"{shown}, as from the checkpoint of one process", is_promise=True)
    return Check(INFERENCE, False, f"{many}, but {one} from the checkpoint of one process", is_promise=True)


def recorded_metrics(run: Path) -> dict[str, Any] | None:
    """Of the run's last evaluation."""
    evaluations = [event["metrics"] for event in read_lines(RunFolder(run).events) if event.get("kind") == "eval"]
    return evaluations[-1] if evaluations else None


def answer(task: Task) -> dict[str, Any]:
    """The metrics over the whole test set, of each run's newest checkpoint in a new model."""
    import torch

    from lockstep.config.schema import Config
    from lockstep.events.event import plain
    from lockstep.recipes.registry import load_recipe, load_training_recipe
    from lockstep.train.job import evaluate_checkpoint
    from lockstep.world.setup import setup_distributed

    if not isinstance(load_recipe(task.config, task.overrides)[1], Config):
        return {"why_not": "a search has no model of its own"}
    recipe, config = load_training_recipe(task.config, task.overrides)
    torch.set_num_threads(config.threads)
    world = setup_distributed(device=config.device)
    return {"metrics": [plain(evaluate_checkpoint(recipe, config, world, Path(run))) for run in task.runs]}


def main() -> None:
    try:
        print(json.dumps(answer(Task(**json.loads(sys.argv[1])))))
    except LockstepError as error:
        sys.exit(str(error))
    except Exception as error:
        sys.exit(users_traceback(error).rstrip())


if __name__ == "__main__":
    main()
