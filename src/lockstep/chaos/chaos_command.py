"""`lockstep chaos`: train while processes are killed and stopped, and check that nothing was lost."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.command_line.config_arguments import ConfigArgument, SettingArguments
from lockstep.command_line.output_paths import trial_folder
from lockstep.command_line.trial_runs import check_trial_config, has_data_workers, require_no_launcher, trial_overrides
from lockstep.errors import UserError
from lockstep.terminal_text import print_line

if TYPE_CHECKING:
    from lockstep.chaos.chaos_trial import ChaosOptions


def chaos(
    config: ConfigArgument,
    overrides: SettingArguments = None,
    kills: Annotated[int, typer.Option("--kills", metavar="K", min=1, help="How many processes to kill.")] = 20,
    seed: Annotated[
        int, typer.Option("--seed", metavar="S", help="Decides which processes are hit, when and how.")
    ] = 0,
    nproc: Annotated[
        int,
        typer.Option(
            "-n",
            "--nproc-per-node",
            metavar="N",
            min=1,
            help="Maximum number of processes; the job also runs on fewer.",
        ),
    ] = 2,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep", metavar="DIR", help="Folder for the runs; default: a temporary one, kept if something was lost."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the verdict, as JSON.")] = False,
) -> None:
    """Train while processes are killed and stopped at random, and check that nothing was lost.

    \b
    lockstep chaos digits --kills 20 --seed 1
    lockstep chaos mine.yaml checkpoint.every=50 --kills 100 --seed 7 -n 4

    First makes one undisturbed run. Then injects faults into further runs, in every phase: kills ranks, data workers
    and launchers, and resizes the job. These runs must make the same steps, use each sample once, end with the same
    bits, and leave nothing behind. The same seed plans the same faults.

    Exit code 0 if nothing was lost, 3 otherwise.
    """
    from lockstep.chaos.chaos_trial import ChaosOptions
    from lockstep.recipes.registry import load_recipe

    if sys.platform != "linux":
        raise UserError(f"lockstep chaos needs /proc, which {sys.platform} does not have: use Linux")
    require_no_launcher("chaos")
    changes = overrides or []
    _, settings = load_recipe(config, changes)
    check_trial_config(settings, nproc)  # before spending time on the undisturbed run
    options = ChaosOptions(kills, seed, nproc, with_data_workers=has_data_workers(settings))
    raise typer.Exit(_run(keep, config, [*changes, *trial_overrides(settings)], options, as_json))


def _run(keep: Path | None, config: str, changes: list[str], options: "ChaosOptions", as_json: bool) -> int:
    """Run it in `keep`, or in a temporary folder that is kept only if something was lost; return the exit code."""
    from lockstep.chaos.chaos_trial import run_chaos

    def report(line: str) -> None:
        if not as_json:
            print_line(line, flush=True)

    with trial_folder(keep, "chaos") as folder:
        verdict = run_chaos(config, changes, options, folder=folder.path, report=report)
        folder.is_kept |= verdict.exit_code != 0
    if as_json:
        print(json.dumps({**verdict.as_json(), "folder": str(folder.path) if folder.is_kept else None}, indent=1))
    for line in verdict.lines():
        report(line)
    if folder.is_kept:
        report(f"the plan, the injected faults and the runs are in {folder.path}")
    return verdict.exit_code
