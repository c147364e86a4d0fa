"""The `lockstep` command. Heavy imports stand inside the commands: `--help` answers at once and loads no torch."""

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep import __version__
from lockstep.commands import ckpt, submit
from lockstep.commands.batch import batch
from lockstep.commands.bench import bench
from lockstep.commands.chaos import chaos
from lockstep.commands.doctor import doctor
from lockstep.commands.init import init
from lockstep.commands.launching import takes_launch_options
from lockstep.commands.plan import plan as plan_command
from lockstep.commands.report import report
from lockstep.commands.verify import ConfigOrScript, verify
from lockstep.commands.watch import watch
from lockstep.config import environment
from lockstep.errors import EXIT_FAILED, EXIT_STOPPED, LockstepError, complain
from lockstep.launcher.plan import LaunchPlan
from lockstep.launcher.start import check_target, start
from lockstep.launcher.worker import run_target, users_traceback
from lockstep.supervision.stop_signals import StopRequested, raise_when_asked_to_stop

if TYPE_CHECKING:
    from lockstep.config.job import JobConfig
    from lockstep.search.recipe import SearchRecipe
    from lockstep.train.continuity import Resume
    from lockstep.train.recipe import Recipe

app = typer.Typer(
    name="lockstep",
    help="Train PyTorch models on one process or many, with the same code.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        # As torchrun does, take --nproc_per_node for --nproc-per-node.
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
)


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        print(f"lockstep {__version__}")
        raise typer.Exit


@app.command()
@takes_launch_options(max_restarts=3)
def train(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, or a built-in recipe's name.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="key=value", help="Settings by dotted path: optim.lr=1e-3")
    ] = None,
    # torchrun, in front of us, takes --run for an abbreviation of an option of its own: hence the longer name.
    run: Annotated[
        Path | None, typer.Option("--run", "--run-dir", metavar="DIR", help="Run folder; default runs/CONFIG.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smoke run of seconds: few steps, little data.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print events as JSON lines.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Go on in a folder whose run had other settings, with these.")
    ] = False,
    accept_drift: Annotated[
        bool, typer.Option("--accept-drift", help="Go on although another machine or version changes the answer.")
    ] = False,
    stop_after: Annotated[
        int | None, typer.Option("--stop-after", metavar="N", min=1, help="Save and stop after step N; exit code 75.")
    ] = None,
    plan: LaunchPlan | None = None,
) -> None:
    """Train a config or a built-in recipe.

    \b
    lockstep train digits -n 2
    lockstep train mine.yaml optim.lr=1e-3 epochs=5
    """
    from lockstep.observe.loggers.selection import check_extras
    from lockstep.recipes.registry import load_recipe

    changes = [*(overrides or []), *(["quick=true"] if quick else [])]
    folder = run or Path("runs") / (Path(config).stem + ("-quick" if quick else ""))
    # In every process: a mistake stops the first, before any other starts.
    recipe, settings = load_recipe(config, changes)
    check_extras(settings.log)
    if plan is not None:
        flags = {"--quiet": quiet, "--json": as_json, "--force": force, "--accept-drift": accept_drift}
        modes = [flag for flag, is_given in flags.items() if is_given]
        modes += [] if stop_after is None else ["--stop-after", str(stop_after)]
        raise typer.Exit(start(plan, ["-m", "lockstep", "train", config, *changes, "--run", str(folder), *modes]))
    resume: Resume = "force" if force else "accept-drift" if accept_drift else "auto"
    _train_here(recipe, settings, folder, resume, stop_after, quiet, as_json)


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
@takes_launch_options(max_restarts=0)
def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python script, or a module with -m.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="The script's own.")] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module's name.")] = False,
    plan: LaunchPlan | None = None,
) -> None:
    """Launch any script on several processes, supervised.

    \b
    lockstep run -n 4 train.py --epochs 10
    """
    target = [*(["-m"] if module else []), script, *(arguments or [])]
    if plan is not None:
        raise typer.Exit(start(plan, target))
    _run_here(target)


# In the order in which `--help` lists them, after those above; groups come last.
app.command(cls=ConfigOrScript, short_help="Is it the same on one process and on N, bit for bit?")(verify)
app.command(short_help="Watch a run, in the terminal or in the browser.")(watch)
app.command(short_help="Tell how a run went, and where its time went.")(report)
app.command("plan", short_help="Predict the speed-up on more processes.")(plan_command)
app.command(short_help="Find the largest batch that fits into memory, and the fastest.")(batch)
app.command(short_help="Is this machine fit, and how do its processes get on?")(doctor)
app.command(short_help="What a step costs here, beside other ways to train.")(bench)
app.command(short_help="Train while being killed, and check that nothing was lost.")(chaos)
app.command(short_help="Write a training script to start from.")(init)
app.add_typer(ckpt.app)
app.add_typer(submit.app, short_help="Write a job for Slurm or Kubernetes.")


def main() -> None:
    """Run the command, and end with the exit code that says how it went."""
    raise_when_asked_to_stop()
    supervised = environment.agent_pid() is not None  # then the agent tells, once for all ranks
    try:
        app()
    except StopRequested as stop:
        if not supervised:
            print(f"lockstep: stopped on request ({stop})", file=sys.stderr)
        sys.exit(EXIT_STOPPED)
    except Exception as error:
        if supervised:
            raise
        if isinstance(error, LockstepError):
            sys.exit(complain(error))
        print(users_traceback(error), file=sys.stderr, end="")
        sys.exit(EXIT_FAILED)


def _run_here(target: list[str]) -> None:
    """Be the script, as if `python` had started it: its signals are its own."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    check_target(target)
    try:
        run_target(target)
    except KeyboardInterrupt:
        raise StopRequested("SIGINT") from None


def _train_here(
    recipe: "Recipe | SearchRecipe",
    settings: "JobConfig",
    folder: Path,
    resume: "Resume",
    stop_after: int | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Be one process of the training: alone, or a worker of whoever started us."""
    import torch

    from lockstep.events.event import Sink
    from lockstep.events.run_folder import RunFolder
    from lockstep.observe.console import console_for
    from lockstep.observe.loggers.selection import open_loggers
    from lockstep.recipes.job import carry_out
    from lockstep.world.setup import leaving_at_the_end, setup_distributed

    torch.set_num_threads(settings.threads)
    environment.set_nccl_debug(settings.nccl_debug)
    with leaving_at_the_end():
        world = setup_distributed(backend=settings.ddp_backend, timeout_s=settings.timeout_s, device=settings.device)
        sinks: list[Sink] = []
        if world.is_main:
            sinks = [*console_for(quiet=quiet, as_json=as_json), *open_loggers(settings.log, folder)]
        carry_out(recipe, settings, world, RunFolder(folder), sinks, resume=resume, stop_after=stop_after)
