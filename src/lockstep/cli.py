"""The `lockstep` command: its subcommands, exit codes and errors.

Heavy imports are inside the commands, so that `--help` answers at once and does not import torch.
"""

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep import __version__
from lockstep.batch.batch_command import batch
from lockstep.bench.bench_command import bench
from lockstep.chaos.chaos_command import chaos
from lockstep.ckpt import ckpt_command
from lockstep.command_line.config_arguments import ConfigArgument, SettingArguments, TakesSettings
from lockstep.command_line.launch_options import describe_misplaced_nproc, takes_launch_options
from lockstep.config import environment
from lockstep.doctor.doctor_command import doctor
from lockstep.errors import EXIT_FAILED, EXIT_STOPPED, LockstepError, Stopped, exit_code_of_signal, print_error
from lockstep.events.run_folder import RunFolder
from lockstep.init.init_command import init
from lockstep.launcher.launch_plan import LaunchPlan, check_target, start_agent
from lockstep.launcher.stop_outcome import describe_resumable_stop
from lockstep.launcher.worker_main import run_target, user_traceback
from lockstep.plan.plan_command import plan as plan_command
from lockstep.report.report_command import report
from lockstep.settings.settings_command import settings
from lockstep.submit import submit_command
from lockstep.supervision.output_streams import keep_failing_streams, open_missing_streams
from lockstep.supervision.stop_signals import (
    StopRequested,
    ignore_stop_signals,
    install_stop_handlers,
    obey_stop_request,
    remove_stop_handlers,
)
from lockstep.terminal_text import print_line
from lockstep.verify.verify_command import ConfigOrScript, verify
from lockstep.watch.watch_command import watch

if TYPE_CHECKING:
    from lockstep.config.job_schema import JobConfig
    from lockstep.search.search_job import SearchRecipe
    from lockstep.train.recipe import Recipe
    from lockstep.train.resume.checkpointer import Resume

app = typer.Typer(
    name="lockstep",
    help="Train PyTorch models on one process or many, with the same code.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        # As in torchrun, --nproc_per_node is accepted for --nproc-per-node.
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
)


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        print_line(f"lockstep {__version__}")
        raise typer.Exit


@app.command(cls=TakesSettings, short_help="Train a config or a built-in recipe.")
@takes_launch_options(max_restarts=3)
def train(
    config: ConfigArgument,
    overrides: SettingArguments = None,
    # --run-dir is for `torchrun -m lockstep train`: torchrun takes --run for an abbreviation of its own --run-path.
    run: Annotated[
        Path | None, typer.Option("--run", "--run-dir", metavar="DIR", help="Run folder; default runs/CONFIG.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A smoke test that takes seconds: few steps, little data.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print events as JSON lines.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Resume even if the settings differ from those of the run in the folder.")
    ] = False,
    accept_drift: Annotated[
        bool,
        typer.Option("--accept-drift", help="Resume even if a different machine or version may change the result."),
    ] = False,
    shared_folder: Annotated[
        bool,
        typer.Option("--shared-folder", help="Write to a run folder that other users own or can write to."),
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
    from lockstep.loggers.logger_factory import check_extras
    from lockstep.recipes.registry import load_config, load_recipe

    keep_failing_streams()
    changes = [*(overrides or []), *(["quick=true"] if quick else [])]
    folder = run or Path("runs") / (Path(config).stem + ("-quick" if quick else ""))
    if plan is not None:
        # Checked here, so that an error stops the launcher before it starts a process. The launcher imports no torch.
        check_extras(load_config(config, changes).log)
        flags = {"--quiet": quiet, "--json": as_json, "--force": force, "--accept-drift": accept_drift}
        flags |= {"--shared-folder": shared_folder}
        given = [flag for flag, is_given in flags.items() if is_given]
        given += [] if stop_after is None else ["--stop-after", str(stop_after)]
        raise typer.Exit(start_agent(plan, ["-m", "lockstep", "train", config, *changes, "--run", str(folder), *given]))
    recipe, settings = load_recipe(config, changes)
    check_extras(settings.log)
    resume: Resume = "force" if force else "accept-drift" if accept_drift else "auto"
    try:
        _train_here(recipe, settings, RunFolder(folder, shared_folder), resume, stop_after, quiet, as_json)
    except StopRequested as stop:  # outside of the steps, after which it would have been saved
        if RunFolder(folder).has_checkpoint():
            raise Stopped(describe_resumable_stop(stop.signal, folder)) from None
        raise


@app.command(
    short_help="Launch any script on several processes, supervised.",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)
@takes_launch_options(max_restarts=0)
def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python script, or a module with -m.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")] = False,
    plan: LaunchPlan | None = None,
) -> None:
    """Launch any script on several processes, supervised.

    \b
    lockstep run -n 4 train.py --epochs 10
    """
    keep_failing_streams()
    target = [*(["-m"] if module else []), script, *(arguments or [])]
    if plan is not None:
        raise typer.Exit(start_agent(plan, target))
    if environment.read_role(nproc_given=False) == "single":
        notice = describe_misplaced_nproc(target)
        if notice is not None:
            print_line(f"lockstep: {notice}", file=sys.stderr)
    _run_here(target)


# In the order in which `--help` lists them, after the two above; groups come last.
app.command(cls=ConfigOrScript, short_help="Check that one process and N give the same bits.")(verify)
app.command(short_help="Watch a run, in the terminal or in the browser.")(watch)
app.command(short_help="Report how a run went, and where its time went.")(report)
app.command("plan", cls=TakesSettings, short_help="Predict the speed-up on more processes.")(plan_command)
app.command(cls=TakesSettings, short_help="Find the largest batch that fits into memory, and the fastest.")(batch)
app.command(short_help="List the settings of a config, and what they do.")(settings)
app.command(short_help="Check this machine, and how its processes communicate.")(doctor)
app.command(short_help="Time a step against other ways to train.")(bench)
app.command(cls=TakesSettings, short_help="Kill processes while training; check nothing is lost.")(chaos)
app.command(short_help="Write a training script to start from.")(init)
app.add_typer(ckpt_command.app, short_help="List, verify, audit, compare and export checkpoints.")
app.add_typer(submit_command.app, short_help="Write a job for Slurm or Kubernetes.")


def main() -> None:
    """Run the command, and end with the exit code that says how it went."""
    install_stop_handlers()
    open_missing_streams()
    try:
        _run_command()
    except SystemExit as end:
        if end.code == EXIT_STOPPED:
            ignore_stop_signals()
        raise
    finally:
        remove_stop_handlers(signal.SIG_DFL)  # nothing is left to stop but what Python does at exit


def _run_command() -> None:
    """Run the command; a stop request, or an error that is not for an agent to report, is printed and ends it."""
    supervised = environment.agent_pid() is not None  # then the agent reports, once for all ranks
    try:
        obey_stop_request()
        app(prog_name="lockstep")  # also under `python -m lockstep`
    except StopRequested as stop:
        keep_failing_streams()  # the terminal may be closed
        if not supervised:
            print_line(f"lockstep: stopped on request ({stop})", file=sys.stderr)
        sys.exit(exit_code_of_signal(stop.signal))
    except Exception as error:
        if supervised:
            raise
        if isinstance(error, LockstepError):
            sys.exit(print_error(error))
        print_line(user_traceback(error), file=sys.stderr, end="")
        sys.exit(EXIT_FAILED)


def _run_here(target: list[str]) -> None:
    """Run the script in this process, as `python` would, with the default signal handlers."""
    obey_stop_request()
    remove_stop_handlers()
    check_target(target)
    try:
        run_target(target)
    except KeyboardInterrupt:
        raise StopRequested(signal.SIGINT) from None


def _train_here(
    recipe: "Recipe | SearchRecipe",
    settings: "JobConfig",
    folder: RunFolder,
    resume: "Resume",
    stop_after: int | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Train in this process: alone, or as one worker of a launcher."""
    from lockstep.events.event_log import Sink
    from lockstep.loggers.logger_factory import open_loggers
    from lockstep.observe.console import console_for
    from lockstep.recipes.registry import run_recipe
    from lockstep.world.process_group import leave_on_exit, setup_distributed
    from lockstep.world.script_process import choose_threads

    choose_threads(settings.threads)
    environment.set_nccl_debug(settings.nccl_debug)
    with leave_on_exit():
        world = setup_distributed(backend=settings.ddp_backend, timeout_s=settings.timeout_s, device=settings.device)
        sinks: list[Sink] = []
        if world.is_main:
            sinks = [*console_for(quiet=quiet, as_json=as_json), *open_loggers(settings.log, folder.path)]
        run_recipe(recipe, settings, world, folder, sinks, resume=resume, stop_after=stop_after)
