"""A search by its config alone, from Python: in this process, as one of several, or on processes of its own.

results = SearchPipeline("config.json", rank=-1, world_size=1).run_complete_pipeline({"span": 1.6})
main_distributed("config.json", world_size=2)
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep.config import environment
from lockstep.errors import LockstepError, print_error
from lockstep.events.run_folder import RunFolder
from lockstep.launcher.launch_plan import LaunchPlan, start_agent
from lockstep.recipes.registry import load_search_recipe
from lockstep.search.search_job import search_recipe
from lockstep.search.search_loop import SearchResult
from lockstep.world.launch import is_interactive
from lockstep.world.process_group import cleanup_distributed, setup_distributed


class SearchPipeline:
    """`rank` and `world_size`: this process's place, -1 and 1 for alone; left out, the launcher's variables say it."""

    setup_distributed = staticmethod(setup_distributed)
    cleanup_distributed = staticmethod(cleanup_distributed)

    def __init__(
        self,
        config: str | Path,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        overrides: Sequence[str] = (),
        folder: str | Path | None = None,
    ) -> None:
        self._recipe, self.config = load_search_recipe(str(config), overrides)
        self.folder = RunFolder(Path("runs") / Path(config).stem if folder is None else Path(folder))
        torch.set_num_threads(self.config.threads)
        environment.set_nccl_debug(self.config.nccl_debug)
        self.world = setup_distributed(
            rank,
            world_size,
            backend=self.config.ddp_backend,
            timeout_s=self.config.timeout_s,
            device=self.config.device,
        )

    def run_complete_pipeline(self, base_params: Mapping[str, Any] | None = None) -> SearchResult:
        """Search, or go on; `base_params`: genes of the design to begin with, over the recipe's own."""
        return search_recipe(self._recipe, self.config, self.world, self.folder, [], base_params=base_params)


def main_distributed(
    config: str | Path, world_size: int, overrides: Sequence[str] = (), *, folder: str | Path | None = None
) -> None:
    """Search on so many processes of this machine, supervised, as `lockstep train CONFIG -n WORLD_SIZE` does."""
    load_search_recipe(str(config), overrides)  # a mistake stops it before any process starts
    target = ["-m", "lockstep", "train", str(config), *overrides]
    target += [] if folder is None else ["--run", str(folder)]
    try:
        exit_code = start_agent(LaunchPlan(nproc=world_size), target)
    except LockstepError as error:
        if is_interactive():
            raise
        exit_code = print_error(error)
    if exit_code != 0:
        sys.exit(exit_code)
