"""`lockstep plan`: predict how fast a run would be on more processes, and whether more are worthwhile."""

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from lockstep.command_line.config_arguments import SettingArguments, complete_config
from lockstep.command_line.output_paths import trial_folder
from lockstep.command_line.trial_runs import check_trial_config, require_no_launcher, run_to_end, trial_overrides
from lockstep.errors import EXIT_FAILED, UserError
from lockstep.terminal_text import print_line

if TYPE_CHECKING:
    from lockstep.events.run_folder import RunFolder
    from lockstep.plan.scaling_model import MeasuredStep, Prediction, ScalingModel

_MAX_LOG_CHARS = 4000
_MAX_PROCESSES = 65536
_DEFAULT_TRIED = "1,2"
_DEFAULT_STEPS = 40


def plan(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CONFIG",
            help="A run folder, or a YAML file or recipe to try out.",
            autocompletion=complete_config,
        ),
    ],
    overrides: SettingArguments = None,
    nproc: Annotated[
        str | None,
        typer.Option(
            "-n", "--nproc-per-node", metavar="N,N…", help="Numbers of processes to predict; default: 1,2,4,…"
        ),
    ] = None,
    tried: Annotated[
        str | None,
        typer.Option(
            "--try", metavar="N,N…", help=f"Numbers of processes to try the config on; default: {_DEFAULT_TRIED}."
        ),
    ] = None,
    measure: Annotated[
        str | None,
        typer.Option("--measure", metavar="N,N…", help="Also measure these numbers, to check the predictions."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="S", min=4, help=f"Steps per trial; default: {_DEFAULT_STEPS}.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the predictions, as JSON.")] = False,
) -> None:
    """Predict the speed-up on more processes from a run, or from short trials of a config.

    \b
    lockstep plan runs/mine
    lockstep plan gpt --try 1,2 -n 1,2,4,8
    lockstep plan gpt --measure 4,8

    A run must have been trained in lockstep mode. Trials leave no files behind.
    """
    from lockstep.events.run_folder import RunFolder

    folder = RunFolder(Path(source))
    requested = [] if nproc is None else _numbers("-n", nproc)
    if folder.run_json.is_file():
        if overrides or tried or measure or steps:
            raise UserError(f"{source} is a run: omit settings, --try, --measure and --steps, which apply to configs")
        num_lanes = _lanes_of(folder)
        if requested and requested[-1] > num_lanes:
            raise UserError(f"-n {requested[-1]}: the run has lanes={num_lanes}, so at most {num_lanes} processes")
        _print_plan(num_lanes, [_measure(folder)], [], requested, as_json=as_json)
    else:
        if folder.path.is_dir():
            raise UserError(f"{source} is not a run folder: it has no run.json; give a run folder, or a config to try")
        to_fit = _numbers("--try", tried or _DEFAULT_TRIED)
        to_check = [] if measure is None else _numbers("--measure", measure)
        _check(source, overrides or [], max(to_fit + to_check + requested))
        trials = _try_out(source, overrides or [], {*to_fit, *to_check}, steps or _DEFAULT_STEPS, quiet=as_json)
        fitted, checked = [trials.steps[n] for n in to_fit], [trials.steps[n] for n in to_check]
        _print_plan(trials.num_lanes, fitted, checked, requested, as_json=as_json)


def _check(config: str, overrides: list[str], max_processes: int) -> None:
    """Raise an error for a config that cannot be planned, before anything is tried."""
    from lockstep.recipes.registry import load_training_recipe

    require_no_launcher("plan")
    _, settings = load_training_recipe(config, overrides)
    check_trial_config(settings, max_processes)


class _Trials(NamedTuple):
    num_lanes: int
    steps: "dict[int, MeasuredStep]"  # by the number of processes


def _try_out(config: str, overrides: list[str], numbers: Collection[int], num_steps: int, *, quiet: bool) -> _Trials:
    """Train for a few steps on each of these numbers of processes, and measure the steps."""
    from lockstep.events.run_folder import RunFolder
    from lockstep.recipes.registry import load_training_recipe

    _, settings = load_training_recipe(config, overrides)
    changes = [*overrides, *trial_overrides(settings, num_steps)]
    changes += ["trace=false", "log_every=1"]
    changes += [f"evaluate_every={num_steps} steps", f"checkpoint.every={num_steps + 1} steps"]
    results: dict[int, MeasuredStep] = {}
    with trial_folder(None, "plan") as folder:
        for processes in sorted(numbers):
            run = folder.path / str(processes)
            _train([config, *changes], processes, run)
            results[processes] = _measure(RunFolder(run))
            num_lanes = _lanes_of(RunFolder(run))
            if not quiet:
                print_line(f"-n {processes}: {results[processes].step_s * 1000:.1f} ms per step", flush=True)
    return _Trials(num_lanes, results)


def _train(settings: list[str], processes: int, run: Path) -> None:
    command = [sys.executable, "-m", "lockstep", "train", *settings, "--run", str(run), "--quiet"]
    command += ["-n", str(processes)] if processes > 1 else []
    log = run.with_suffix(".log")
    with log.open("wb") as output:
        code = run_to_end(command, {}, output)
    if code != 0:
        print(log.read_text(errors="replace")[-_MAX_LOG_CHARS:], file=sys.stderr, end="")
        raise typer.Exit(code if code > 0 else EXIT_FAILED)


def _print_plan(
    num_lanes: int,
    fitted: "list[MeasuredStep]",
    checked: "list[MeasuredStep]",
    requested: list[int],
    *,
    as_json: bool,
) -> None:
    """Fit the model to `fitted`, and print its predictions next to the measurements, including `checked`."""
    from lockstep.plan.scaling_model import ScalingModel

    model = ScalingModel(fitted, num_lanes)
    numbers = sorted({*(requested or _powers_of_two(num_lanes)), *(run.processes for run in checked)})
    predictions = [_predict(model, number, [*fitted, *checked]) for number in numbers]
    if as_json:
        values = [{**each._asdict(), "error": each.error} for each in predictions]
        print(json.dumps({"lanes": num_lanes, "knows_travel": model.knows_travel, "predictions": values}, indent=1))
        return
    for line in _table(predictions):
        print_line(line)
    for line in _advice(model, predictions):
        print_line(line)


def _predict(model: "ScalingModel", processes: int, runs: "list[MeasuredStep]") -> "Prediction":
    """Predict a step; add the measured speed-up if both this number of processes and one were tried."""
    prediction = model.predict(processes)
    step_s = {run.processes: run.step_s for run in runs}
    if processes not in step_s or 1 not in step_s:
        return prediction
    return prediction._replace(measured=step_s[1] / step_s[processes])


def _table(predictions: "list[Prediction]") -> list[str]:
    lines = ["processes  lanes each       step  gradient wait  predicted speed-up     measured"]
    for each in predictions:
        low, high = (each.speed_up * (1 + side * each.doubt) for side in (-1, 1))
        predicted = f"×{each.speed_up:.2f} ({low:.2f} to {high:.2f})"
        measured = "" if each.measured is None else f"×{each.measured:.2f} ({each.error:+.0%})"
        waiting = f"{each.exchange_s / each.step_s:.0%}"
        step = f"{each.step_s * 1000:.1f} ms"
        line = f"{each.processes:>9}  {each.lanes:>10}  {step:>9}  {waiting:>13}  {predicted:<21}  {measured}"
        lines.append(line.rstrip())
    return lines


def _advice(model: "ScalingModel", predictions: "list[Prediction]") -> list[str]:
    from lockstep.plan.scaling_model import largest_worthwhile

    lines = []
    if not model.knows_travel:
        lines.append("These are upper bounds: a run on one process says nothing about communication.")
        lines.append("Plan from a run on two or more processes, or with --try 1,2.")
    if predictions[-1].processes == 1:
        return lines
    most = largest_worthwhile(predictions)
    larger = [each.processes for each in predictions if each.processes > most]
    if not larger:
        lines.append(f"Worth it up to {most} processes, the largest number predicted.")
    elif most == 1:
        lines.append(f"Stay with one process: {larger[0]} would be less than 10% faster.")
    else:
        lines.append(f"Worth it up to {most} processes: {larger[0]} would be less than 10% faster.")
    return lines


def _powers_of_two(num_lanes: int) -> list[int]:
    """Return 1, 2, 4 … up to the number of lanes."""
    return [1 << power for power in range(num_lanes.bit_length())]


def _numbers(option: str, text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 0 < int(part) <= _MAX_PROCESSES for part in parts):
        raise UserError(f"{option} {text[:60]}: expected numbers of processes, at most {_MAX_PROCESSES}, as in 1,2,4")
    return sorted({int(part) for part in parts})


def _measure(folder: "RunFolder") -> "MeasuredStep":
    from lockstep.observe.step_timing import read_rank_times
    from lockstep.plan.scaling_model import measured_step

    return measured_step(read_rank_times(folder))


def _lanes_of(folder: "RunFolder") -> int:
    fingerprint = folder.read_run_json().get("fingerprint", {})
    lanes = fingerprint.get("lanes") if isinstance(fingerprint, dict) else None
    if not isinstance(lanes, int) or lanes < 1:
        raise UserError(f"{folder.path} has no lanes: expected a training run in lockstep mode")
    return lanes
