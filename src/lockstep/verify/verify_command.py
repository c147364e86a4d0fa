"""`lockstep verify`: check that a config or script gives the same result on one process and on several."""

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.command_line.config_arguments import TakesSettings, complete_config_or_script, complete_setting
from lockstep.command_line.output_paths import trial_folder
from lockstep.command_line.trial_runs import check_trial_config, leave_hand_set_job, trial_overrides
from lockstep.errors import UserError
from lockstep.terminal_text import print_line

if TYPE_CHECKING:
    from lockstep.verify.verify_verdict import VerifyVerdict

_SCRIPT = ".py"


class ConfigOrScript(TakesSettings):
    """Leaves arguments after a script to the script, as torchrun does; options may come before or after a config."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_interspersed_args = False
        found, _, _ = self.make_parser(ctx).parse_args(list(args))
        ctx.allow_interspersed_args = not _is_script(str(found.get("target")), bool(found.get("module")))
        return super().parse_args(ctx, args)


def verify(
    target: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|SCRIPT",
            help="A YAML file, the name of a built-in recipe, or a Python script.",
            autocompletion=complete_config_or_script,
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="key=value|ARGS",
            help="Settings by dotted path, or the script's arguments.",
            autocompletion=complete_setting,
        ),
    ] = None,
    nproc: Annotated[
        int, typer.Option("-n", "--nproc-per-node", metavar="N", min=2, help="Processes to compare with one.")
    ] = 2,
    steps: Annotated[int, typer.Option("--steps", metavar="S", min=2, help="Steps of each run.")] = 8,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")] = False,
    one_args: Annotated[
        str, typer.Option("--one-args", metavar="ARGS", help="Additional script arguments, only on one process.")
    ] = "",
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep", metavar="DIR", help="Folder for the runs; default: a temporary one, kept if they differ."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the verdict, as JSON.")] = False,
) -> None:
    """Check that training gives the same bits on one process and on N, and after a stop and a resume.

    \b
    lockstep verify digits -n 4
    lockstep verify mine.yaml optim.lr=1e-3 --steps 20
    lockstep verify -n 2 --one-args "--batch-size 64" train.py --batch-size 32

    Trains for a few steps, several times, and compares every step. Reports the first step, phase and tensor that
    differ, by how much, and the likely cause. Then prints a checklist with evidence for each line. A script may use
    lockstep's loop or any other.

    Exit code 0 if all runs are the same, or differ by rounding alone; 6 if they differ; if a run fails, its own: 3 for
    an error, 5 for a hang, 2 for a mistake in the command.
    """
    leave_hand_set_job("verify")
    if _is_script(target, module):
        verification = _prepare_script(
            [*(["-m"] if module else []), target, *(arguments or [])], one_args, nproc, steps
        )
    elif one_args:
        raise UserError(
            f"--one-args {one_args!r} is for scripts: omit it, since a config's batch does not depend on processes"
        )
    else:
        verification = _prepare_config(target, arguments or [], nproc, steps)
    raise typer.Exit(_run(keep, verification, as_json))


def _is_script(target: str, module: bool) -> bool:
    return module or target.endswith(_SCRIPT)


# Runs the verification, given a folder for its files and a function that prints a line of progress.
Verification = Callable[[Path, Callable[[str], None]], "VerifyVerdict"]


def _prepare_script(target: list[str], one_args: str, nproc: int, steps: int) -> Verification:
    from lockstep.launcher.launch_plan import check_target

    check_target(target)
    try:
        more = shlex.split(one_args)
    except ValueError as error:
        raise UserError(f"--one-args {one_args!r}: {error}") from None

    def verification(folder: Path, report: Callable[[str], None]) -> "VerifyVerdict":
        from lockstep.verify.verifier import verify_script

        return verify_script(target, processes=nproc, steps=steps, one_args=more, folder=folder, report=report)

    return verification


def _prepare_config(config: str, changes: list[str], nproc: int, steps: int) -> Verification:
    from lockstep.recipes.registry import load_recipe
    from lockstep.verify.inference_check import make_inference_check

    _, settings = load_recipe(config, changes)
    check_trial_config(settings)
    changes = [*changes, *trial_overrides(settings, steps)]

    def verification(folder: Path, report: Callable[[str], None]) -> "VerifyVerdict":
        from lockstep.verify.verifier import verify_config

        inference = make_inference_check(config, changes)
        return verify_config(
            [config, *changes], processes=nproc, steps=steps, folder=folder, report=report, inference=inference
        )

    return verification


def _run(keep: Path | None, verification: Verification, as_json: bool) -> int:
    """Run it in `keep`, or in a temporary folder that is kept only if runs differ; return the exit code."""

    def report(line: str) -> None:
        if not as_json:
            print_line(line, flush=True)

    with trial_folder(keep, "verify") as folder:
        verdict = verification(folder.path, report)
        folder.is_kept |= verdict.differing is not None and not verdict.differing.is_rounding
    if as_json:
        print(json.dumps({**verdict.as_json(), "folder": str(folder.path) if folder.is_kept else None}, indent=1))
    if verdict.failure is not None:
        print_line(verdict.failure.text, file=sys.stderr, flush=True)
    for line in verdict.lines():
        report(line)
    if folder.is_kept:
        report(f"the runs are in {folder.path}")
    return verdict.exit_code
