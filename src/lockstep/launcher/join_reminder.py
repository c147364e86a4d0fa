"""Says when a script trains on several processes that have not joined the job: each trains a copy of its own."""

import sys
from typing import Any

from lockstep.config.placement import Placement
from lockstep.terminal_text import print_line

_AFTER_STEPS = 3


def remind_to_join(place: Placement) -> None:
    """Print a line if this rank makes some optimizer steps before a process group; call it on one rank."""
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_post_hook

    num_steps = 0

    def count(*_: Any) -> None:  # stays a hook: torch may be iterating over its hooks
        nonlocal num_steps
        num_steps += 1
        if num_steps == _AFTER_STEPS and not dist.is_initialized():
            print_line(
                f"lockstep: no process group after {_AFTER_STEPS} optimizer steps, so each of the {place.world_size} "
                "processes trains a copy of its own: join them with lockstep.launch(main) or "
                "torch.distributed.init_process_group(), or start one process (-n 1)",
                file=sys.stderr,
            )

    register_optimizer_step_post_hook(count)
