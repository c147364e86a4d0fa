"""`lockstep chaos`: train while being killed, and see whether anything was lost."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.commands.trial_folder import trial_folder
from lockstep.config import environment
from lockstep.errors import UserError

if TYPE_CHECKING:
    from lockstep.observe.chaos.endurance import Assault


def chaos(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, or a built-in recipe's name.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="key=value", help="Settings by dotted path: optim.lr=1e-3")
    ] = None,
    kills: Annotated[int, typer.Option("--kills", metavar="K", min=1, help="Processes to kill.")] = 20,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Of the attacks: who, when, how.")] = 0,
    nproc: Annotated[
        int, typer.Option("-n", "--nproc-per-node", metavar="N", min=1, help="The most processes; it is resized too.")
    ] = 2,
    keep: Annotated[
        Path | None, typer.Option("--keep", metavar="DIR", help="Leave the runs there; else only if something is lost.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict alone, as JSON.")] = False,
) -> None:
    """Train while processes are killed and stopped at random, and check that nothing was lost.

    \b
    lockstep chaos digits --kills 20 --seed 1
    lockstep chaos mine.yaml checkpoint.every=50 --kills 100 --seed 7 -n 4

    First a run is left alone; then others are attacked in every phase: ranks, the launcher, what is between them. They
    must make the same steps, use each sample once and end with the same bits, and leave nothing behind. The same seed
    draws the same attacks. Exit code 0: nothing was lost; 3: something was.
    """
    from lockstep.commands.trial_settings import check_settings, has_data_workers, trial_overrides
    from lockstep.observe.chaos.endurance import Assault
    from lockstep.recipes.registry import load_recipe

    if sys.platform != "linux":
        raise UserError(f"lockstep chaos looks at processes through /proc, which {sys.platform} has not: use Linux")
    if environment.role(nproc_given=False) == "worker":
        raise UserError("lockstep chaos starts its processes itself: start it once, without a launcher")
    changes = overrides or []
    _, settings = load_recipe(config, changes)
    check_settings(settings, nproc)  # before a run is left alone for nothing
    assault = Assault(kills, seed, nproc, with_data_workers=has_data_workers(settings))
    raise typer.Exit(_endure_in(keep, config, [*changes, *trial_overrides(settings)], assault, as_json))


def _endure_in(keep: Path | None, config: str, changes: list[str], assault: "Assault", as_json: bool) -> int:
    """In a folder that is gone afterwards, unless it is the user's or there is something to see in it."""
    from lockstep.observe.chaos.endurance import endure

    def tell(line: str) -> None:
        if not as_json:
            print(line, flush=True)

    with trial_folder(keep, "chaos") as folder:
        verdict = endure(config, changes, assault, folder=folder.path, tell=tell)
        folder.is_kept |= verdict.exit_code != 0
    if as_json:
        print(json.dumps({**verdict.as_json(), "folder": str(folder.path) if folder.is_kept else None}, indent=1))
    for line in verdict.lines():
        tell(line)
    if folder.is_kept:
        tell(f"the plan, the attacks and the runs are in {folder.path}")
    return verdict.exit_code
