"""The program in which `lockstep batch` tries one batch size: if it is killed, the search continues.

Its first argument is a `BatchTrialTask`, as JSON; its second is the file for its result.
"""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import LockstepError, UserError
from lockstep.launcher.worker_main import user_traceback
from lockstep.supervision.linux_processes import die_with_parent


class BatchTrialTask(NamedTuple):
    """Which size to try, and with how much memory."""

    config: str
    overrides: list[str]
    lane_batch: int
    lanes: int  # of one process
    processes: int  # that will share this machine
    room_bytes: int | None  # of memory for each; None: its share of the machine's
    parent: int  # process id of the command


def run_batch_trial(task: BatchTrialTask) -> dict[str, Any]:
    """Make steps of this size and return the result: whether it `fits`, and the measurements if it does."""
    import torch

    from lockstep.checkpoint.available_memory import available_memory_bytes
    from lockstep.recipes.registry import load_training_recipe
    from lockstep.train.batch_trial import try_lane
    from lockstep.world.process_group import setup_distributed
    from lockstep.world.process_memory import is_out_of_memory, limit_memory, memory_share
    from lockstep.world.script_process import choose_threads

    recipe, config = load_training_recipe(task.config, task.overrides)
    choose_threads(config.threads)
    world = setup_distributed(device=config.device)
    room = task.room_bytes
    if world.device.type == "cuda":
        total = torch.cuda.mem_get_info(world.device)[1]
        room = total // -(-task.processes // torch.cuda.device_count()) if room is None else min(room, total)
        torch.cuda.set_per_process_memory_fraction(room / total, world.device)
    elif room is None:
        room = memory_share(available_memory_bytes(), task.processes)
    device_info = {"device": world.device.type, "room_bytes": room}
    try:
        with limit_memory(None if world.device.type == "cuda" else room):
            return {
                "fits": True,
                **device_info,
                **try_lane(recipe, config, world, task.lane_batch, task.lanes)._asdict(),
            }
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return {"fits": False, **device_info, "why": "out of memory"}


def main() -> None:
    task, file = BatchTrialTask(**json.loads(sys.argv[1])), Path(sys.argv[2])
    die_with_parent(task.parent)
    with suppress(OSError):  # have the kernel kill this process first if memory runs out
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        found = run_batch_trial(task)
    except LockstepError as error:
        found = {"error": str(error), "is_users": isinstance(error, UserError)}
    except Exception as error:
        found = {"error": user_traceback(error).rstrip(), "is_users": False}
    file.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
