"""`lockstep verify`: is it the same on one process and on several? Of a config, or of any script."""

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from lockstep.commands.trial_folder import trial_folder
from lockstep.config import environment
from lockstep.errors import UserError

if TYPE_CHECKING:
    from lockstep.observe.verification.verdict import Verdict

_SCRIPT = ".py"


class ConfigOrScript(TyperCommand):
    """What follows a script is the script's, as torchrun has it; options may stand on both sides of a config."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_interspersed_args = False
        found, _, _ = self.make_parser(ctx).parse_args(list(args))
        ctx.allow_interspersed_args = not _is_script(str(found.get("target")), bool(found.get("module")))
        return super().parse_args(ctx, args)


def verify(
    target: Annotated[
        str, typer.Argument(metavar="CONFIG|SCRIPT", help="A YAML file, a built-in recipe's name, or a Python script.")
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="key=value|ARGS", help="A config's settings by dotted path; or the script's own."),
    ] = None,
    nproc: Annotated[
        int, typer.Option("-n", "--nproc-per-node", metavar="N", min=2, help="Processes to compare one with.")
    ] = 2,
    steps: Annotated[int, typer.Option("--steps", metavar="S", min=2, help="Steps of each run.")] = 8,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module's name.")] = False,
    one_args: Annotated[
        str, typer.Option("--one-args", metavar="ARGS", help="More of a script's own, for the one process alone.")
    ] = "",
    keep: Annotated[
        Path | None, typer.Option("--keep", metavar="DIR", help="Leave the runs there; else only if they differ.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict alone, as JSON.")] = False,
) -> None:
    """Is it the same on one process and on N, bit for bit, and after a stop and a resume?

    \b
    lockstep verify digits -n 4
    lockstep verify mine.yaml optim.lr=1e-3 --steps 20
    lockstep verify -n 2 --one-args "--batch-size 64" train.py --batch-size 32

    Trains for a few steps, several times, and compares every step; names the first step, phase and tensor that differ,
    by how much, and the likely cause. Then a checklist, each line with what shows it. A script may have a loop of
    lockstep's or any other. Exit code 0: the same; 3: different.
    """
    if environment.role(nproc_given=False) == "worker":
        raise UserError("lockstep verify starts its processes itself: start it once, without a launcher")
    if _is_script(target, module):
        begun = _script([*(["-m"] if module else []), target, *(arguments or [])], one_args, nproc, steps)
    elif one_args:
        raise UserError(f"--one-args {one_args!r} is for scripts: a config's batch does not depend on the processes")
    else:
        begun = _config(target, arguments or [], nproc, steps)
    raise typer.Exit(_verify_in(keep, begun, as_json))


def _is_script(target: str, module: bool) -> bool:
    return module or target.endswith(_SCRIPT)


Begun = Callable[[Path, Callable[[str], None]], "Verdict"]  # with a folder, and with where to tell how it goes


def _script(target: list[str], one_args: str, nproc: int, steps: int) -> Begun:
    from lockstep.launcher.start import check_target

    check_target(target)
    try:
        more = shlex.split(one_args)
    except ValueError as error:
        raise UserError(f"--one-args {one_args!r}: {error}") from None

    def begin(folder: Path, tell: Callable[[str], None]) -> "Verdict":
        from lockstep.observe.verification.verifier import verify_script

        return verify_script(target, processes=nproc, steps=steps, one_args=more, folder=folder, tell=tell)

    return begin


def _config(config: str, changes: list[str], nproc: int, steps: int) -> Begun:
    from lockstep.commands.inference_trial import inference_of
    from lockstep.commands.trial_settings import check_settings, trial_overrides
    from lockstep.recipes.registry import load_recipe

    _, settings = load_recipe(config, changes)
    check_settings(settings)
    changes = [*changes, *trial_overrides(settings, steps)]

    def begin(folder: Path, tell: Callable[[str], None]) -> "Verdict":
        from lockstep.observe.verification.verifier import verify_config

        inference = inference_of(config, changes)
        return verify_config(
            [config, *changes], processes=nproc, steps=steps, folder=folder, tell=tell, inference=inference
        )

    return begin


def _verify_in(keep: Path | None, begun: Begun, as_json: bool) -> int:
    """In a folder that is gone afterwards, unless it is the user's or there is something to see in it."""

    def tell(line: str) -> None:
        if not as_json:
            print(line, flush=True)

    with trial_folder(keep, "verify") as folder:
        verdict = begun(folder.path, tell)
        folder.is_kept |= verdict.parted is not None
    if as_json:
        print(json.dumps({**verdict.as_json(), "folder": str(folder.path) if folder.is_kept else None}, indent=1))
    if verdict.failure is not None:
        print(verdict.failure.text, file=sys.stderr, flush=True)
    for line in verdict.lines():
        tell(line)
    if folder.is_kept:
        tell(f"the runs are in {folder.path}")
    return verdict.exit_code
