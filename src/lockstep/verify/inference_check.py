"""Check that a checkpoint of several processes loads for inference in a single new process.

This file is also the program of that process: its argument is an `InferenceTask`, as JSON, and it prints JSON.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import LockstepError
from lockstep.events.jsonl import read_jsonl
from lockstep.events.run_folder import RunFolder
from lockstep.launcher.worker_main import user_traceback
from lockstep.verify.checklist import ChecklistItem
from lockstep.verify.verifier import INFERENCE

_MOST_SHOWN = 3


class InferenceTask(NamedTuple):
    """What to load."""

    config: str
    overrides: list[str]
    runs: list[str]


def make_inference_check(config: str, overrides: list[str]) -> Callable[[Path, Path], ChecklistItem]:
    """Make the check: a function of the run folders of one process and of several."""

    def check(one: Path, many: Path) -> ChecklistItem:
        task = InferenceTask(config, overrides, [str(many), str(one)])
        command = [sys.executable, "-m", "lockstep.verify.inference_check", json.dumps(task._asdict())]
        finished = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        answer = finished.stdout.splitlines()[-1:]
        if finished.returncode != 0 or not answer:
            return ChecklistItem(
                INFERENCE,
                False,
                finished.stderr.strip()[-2000:] or "it ended without a message",
                is_promise=True,
            )
        return judge_inference(json.loads(answer[0]), recorded_metrics(many))

    return check


def judge_inference(found: dict[str, Any], recorded: dict[str, Any] | None) -> ChecklistItem:
    """Compare metrics.

    Args:
        found: what the process printed: metrics from the checkpoint of several processes, and of one.
        recorded: the metrics that the run on several processes recorded.
    """
    if "why_not" in found:
        return ChecklistItem(INFERENCE, None, found["why_not"])
    many, one = found["metrics"]
    shown = ", ".join(
        f"{name} {value:.6g}" for name, value in list(many.items())[:_MOST_SHOWN] if isinstance(value, float)
    )
    if many == recorded:
        return ChecklistItem(INFERENCE, True, f"{shown}, as recorded by the run itself", is_promise=True)
    if many == one:
        return ChecklistItem(INFERENCE, True, f"{shown}, as from the checkpoint of one process", is_promise=True)
    return ChecklistItem(INFERENCE, False, f"{many}, but {one} from the checkpoint of one process", is_promise=True)


def recorded_metrics(run: Path) -> dict[str, Any] | None:
    """Return the metrics of the run's last evaluation."""
    evaluations = [event["metrics"] for event in read_jsonl(RunFolder(run).events) if event.get("kind") == "eval"]
    return evaluations[-1] if evaluations else None


def run_inference_trial(task: InferenceTask) -> dict[str, Any]:
    """Load each run's newest checkpoint into a new model, and compute its metrics over the whole test set."""

    from lockstep.config.train_schema import Config
    from lockstep.events.event_log import json_safe
    from lockstep.recipes.registry import load_recipe, load_training_recipe
    from lockstep.train.train_job import evaluate_checkpoint
    from lockstep.world.process_group import setup_distributed
    from lockstep.world.script_process import choose_threads

    if not isinstance(load_recipe(task.config, task.overrides)[1], Config):
        return {"why_not": "a search has no model to load"}
    recipe, config = load_training_recipe(task.config, task.overrides)
    choose_threads(config.threads)
    world = setup_distributed(device=config.device)
    return {"metrics": [json_safe(evaluate_checkpoint(recipe, config, world, Path(run))) for run in task.runs]}


def main() -> None:
    try:
        print(json.dumps(run_inference_trial(InferenceTask(**json.loads(sys.argv[1])))))
    except LockstepError as error:
        sys.exit(str(error))
    except Exception as error:
        sys.exit(user_traceback(error).rstrip())


if __name__ == "__main__":
    main()
