"""The process in which `lockstep batch` tries one size: whatever becomes of it, the search goes on.

Its first argument says what to try, as JSON; it leaves its answer in the file that the second names.
"""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import LockstepError, UserError
from lockstep.launcher.kinship import die_with_parent
from lockstep.launcher.worker import users_traceback


class Task(NamedTuple):
    config: str
    overrides: list[str]
    lane_batch: int
    lanes: int  # of one process
    processes: int  # that will share this machine
    room_bytes: int | None  # for each; None: what the machine has
    parent: int  # process id


def answer(task: Task) -> dict[str, Any]:
    """What came of it: `fits` and the measurements, or `error` in words, and whether it `is_users`."""
    import torch

    from lockstep.checkpoint.memory_room import available_bytes
    from lockstep.recipes.registry import load_training_recipe
    from lockstep.train.batch_trial import try_lane
    from lockstep.world.memory import is_out_of_memory, limited_memory, memory_share
    from lockstep.world.setup import setup_distributed

    recipe, config = load_training_recipe(task.config, task.overrides)
    torch.set_num_threads(config.threads)
    world = setup_distributed(device=config.device)
    room = task.room_bytes
    if world.device.type == "cuda":
        total = torch.cuda.mem_get_info(world.device)[1]
        room = total // -(-task.processes // torch.cuda.device_count()) if room is None else min(room, total)
        torch.cuda.set_per_process_memory_fraction(room / total, world.device)
    elif room is None:
        room = memory_share(available_bytes(), task.processes)
    facts = {"device": world.device.type, "room_bytes": room}
    try:
        with limited_memory(None if world.device.type == "cuda" else room):
            return {"fits": True, **facts, **try_lane(recipe, config, world, task.lane_batch, task.lanes)._asdict()}
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return {"fits": False, **facts, "why": "out of memory"}


def main() -> None:
    task, file = Task(**json.loads(sys.argv[1])), Path(sys.argv[2])
    die_with_parent(task.parent)
    with suppress(OSError):  # if anything must be killed for lack of memory, let it be this
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        found = answer(task)
    except LockstepError as error:
        found = {"error": str(error), "is_users": isinstance(error, UserError)}
    except Exception as error:
        found = {"error": users_traceback(error).rstrip(), "is_users": False}
    file.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
