"""Run a search recipe from Python: in this process, as one rank of several, or on new processes.

    result = SearchPipeline("config.yaml", rank=-1, world_size=1).run_complete_pipeline({"span": 1.6})
    main_distributed("config.yaml", world_size=2)

The configs are those of `lockstep train`.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.config import environment
from lockstep.config.folder_remedies import FolderRemedies
from lockstep.errors import LockstepError, print_error
from lockstep.events.run_folder import RunFolder
from lockstep.launcher.launch_plan import LaunchPlan, start_agent
from lockstep.recipes.registry import load_search_recipe
from lockstep.search.search_job import search_recipe
from lockstep.search.search_loop import SearchResult
from lockstep.world.process_group import cleanup_distributed, setup_distributed
from lockstep.world.script_process import choose_threads, is_interactive

_REMEDIES = FolderRemedies(
    "give SearchPipeline another folder",
    "--force to `lockstep train`",
    "--accept-drift to `lockstep train`",
    "--shared-folder to `lockstep train`",
)


class SearchPipeline:
    """A search recipe, ready to run on this rank.

    Args:
        config: a YAML file, or the name of a built-in search recipe.
        rank: this process's rank, or -1 to run alone; read from the launcher's environment variables if omitted.
        world_size: the number of processes; read from the launcher's environment variables if omitted.
        overrides: config overrides, as in `["max_generations=10"]`.
        folder: the run folder; runs/NAME if omitted, where NAME is the config's file name without its suffix.
    """

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
        choose_threads(self.config.threads)
        environment.set_nccl_debug(self.config.nccl_debug)
        self.world = setup_distributed(
            rank,
            world_size,
            backend=self.config.ddp_backend,
            timeout_s=self.config.timeout_s,
            device=self.config.device,
        )

    def run_complete_pipeline(self, base_params: Mapping[str, Any] | None = None) -> SearchResult:
        """Run the search, or resume it.

        Args:
            base_params: genes of the design to start with; they override those of the recipe's `base`.
        """
        return search_recipe(
            self._recipe, self.config, self.world, self.folder, [], base_params=base_params, remedies=_REMEDIES
        )


def main_distributed(
    config: str | Path, world_size: int, overrides: Sequence[str] = (), *, folder: str | Path | None = None
) -> None:
    """Search on `world_size` new processes on this machine, supervised, as `lockstep train CONFIG -n WORLD_SIZE` does.

    Args:
        config: a YAML file, or the name of a built-in search recipe.
        world_size: the number of processes to start.
        overrides: config overrides, as in `["max_generations=10"]`.
        folder: the run folder; chosen as by `lockstep train` if omitted.
    """
    load_search_recipe(str(config), overrides)  # reports mistakes in the config before any process starts
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
