"""`lockstep plan`: how fast a run would be on more processes, and whether they are worth it."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.commands.trial_folder import trial_folder
from lockstep.config import environment
from lockstep.errors import EXIT_FAILED, UserError

if TYPE_CHECKING:
    from lockstep.events.run_folder import RunFolder
    from lockstep.observe.scaling import Measured, Prediction, ScalingModel

_MAX_LOG_CHARS = 4000
_MAX_PROCESSES = 65536
_TRIED = "1,2"
_STEPS = 40


def plan(
    source: Annotated[str, typer.Argument(metavar="RUN|CONFIG", help="A run folder; or a YAML file or recipe to try.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="key=value", help="Settings by dotted path: optim.lr=1e-3")
    ] = None,
    nproc: Annotated[
        str | None,
        typer.Option("-n", "--nproc-per-node", metavar="N,N…", help="Processes to predict; default: 1, 2, 4 …"),
    ] = None,
    tried: Annotated[
        str | None,
        typer.Option("--try", metavar="N,N…", help=f"Processes that the config is tried with; default: {_TRIED}."),
    ] = None,
    measure: Annotated[
        str | None, typer.Option("--measure", metavar="N,N…", help="Try these too, and score the predictions.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="S", min=4, help=f"Steps of each trial; default: {_STEPS}.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the predictions alone, as JSON.")] = False,
) -> None:
    """Predict the speed-up on more processes from a run, or from short trials of a config.

    \b
    lockstep plan runs/mine
    lockstep plan gpt --try 1,2 -n 1,2,4,8
    lockstep plan gpt --measure 4,8

    A run must have been made in lockstep mode. Nothing that is tried is left behind.
    """
    from lockstep.events.run_folder import RunFolder

    folder = RunFolder(Path(source))
    asked = [] if nproc is None else _numbers("-n", nproc)
    if folder.facts.is_file():
        if overrides or tried or measure or steps:
            raise UserError(f"{source} is a run: settings, --try, --measure and --steps go with a config")
        num_lanes = _lanes_of(folder)
        if asked and asked[-1] > num_lanes:
            raise UserError(f"-n {asked[-1]}: the run has lanes={num_lanes}, and so at most {num_lanes} processes")
        _tell(num_lanes, [_measured(folder)], [], asked, as_json=as_json)
    else:
        wanted, scores = _numbers("--try", tried or _TRIED), [] if measure is None else _numbers("--measure", measure)
        _check(source, overrides or [], max(wanted + scores + asked))
        num_lanes, runs, scored = _try_out(source, overrides or [], wanted, scores, steps or _STEPS, quiet=as_json)
        _tell(num_lanes, runs, scored, asked, as_json=as_json)


def _check(config: str, overrides: list[str], most: int) -> None:
    """Refuse, before anything is tried, what could not be told of in the end."""
    from lockstep.commands.trial_settings import check_settings
    from lockstep.recipes.registry import load_training_recipe

    if environment.role(nproc_given=False) == "worker":
        raise UserError("lockstep plan starts its processes itself: start it once, without a launcher")
    _, settings = load_training_recipe(config, overrides)
    check_settings(settings, most)


def _try_out(
    config: str, overrides: list[str], wanted: Sequence[int], scores: Sequence[int], steps: int, *, quiet: bool
) -> "tuple[int, list[Measured], list[Measured]]":
    from lockstep.commands.trial_settings import trial_overrides
    from lockstep.events.run_folder import RunFolder
    from lockstep.recipes.registry import load_training_recipe

    _, settings = load_training_recipe(config, overrides)
    changes = [*overrides, *trial_overrides(settings, steps)]
    changes += ["trace=false", "log_every=1", f"evaluate_every={steps} steps", f"checkpoint.every={steps + 1} steps"]
    results: dict[int, Measured] = {}
    with trial_folder(None, "plan") as folder:
        for processes in sorted({*wanted, *scores}):
            run = folder.path / str(processes)
            _train([config, *changes], processes, run)
            results[processes] = _measured(RunFolder(run))
            num_lanes = _lanes_of(RunFolder(run))
            if not quiet:
                print(f"-n {processes}: {results[processes].step_s * 1000:.1f} ms a step", flush=True)
    return num_lanes, [results[n] for n in wanted], [results[n] for n in scores]


def _train(settings: list[str], processes: int, run: Path) -> None:
    from lockstep.observe.verification.trials import run_to_its_end

    command = [sys.executable, "-m", "lockstep", "train", *settings, "--run", str(run), "--quiet"]
    command += ["-n", str(processes)] if processes > 1 else []
    log = run.with_suffix(".log")
    with log.open("wb") as output:
        code = run_to_its_end(command, {}, output)
    if code != 0:
        print(log.read_text(errors="replace")[-_MAX_LOG_CHARS:], file=sys.stderr, end="")
        raise typer.Exit(code if code > 0 else EXIT_FAILED)


def _tell(num_lanes: int, runs: "list[Measured]", scored: "list[Measured]", asked: list[int], *, as_json: bool) -> None:
    from lockstep.observe.scaling import ScalingModel

    model = ScalingModel(runs, num_lanes)
    numbers = sorted({*(asked or _useful(num_lanes)), *(run.processes for run in scored)})
    predictions = [_scored(model, number, [*runs, *scored]) for number in numbers]
    if as_json:
        values = [{**each._asdict(), "error": each.error} for each in predictions]
        print(json.dumps({"lanes": num_lanes, "knows_travel": model.knows_travel, "predictions": values}, indent=1))
        return
    for line in _table(predictions):
        print(line)
    for line in _advice(model, predictions):
        print(line)


def _scored(model: "ScalingModel", processes: int, known: "list[Measured]") -> "Prediction":
    prediction = model.predict(processes)
    by_size = {run.processes: run.step_s for run in known}
    if processes not in by_size or 1 not in by_size:
        return prediction
    return prediction._replace(measured=by_size[1] / by_size[processes])


def _table(predictions: "list[Prediction]") -> list[str]:
    lines = ["processes  lanes each       step  waiting for gradients  speed-up predicted     measured"]
    for each in predictions:
        low, high = (each.speed_up * (1 + side * each.doubt) for side in (-1, 1))
        said = f"×{each.speed_up:.2f} ({low:.2f} to {high:.2f})"
        seen = "" if each.measured is None else f"×{each.measured:.2f} ({each.error:+.0%})"
        waiting = f"{each.exchange_s / each.step_s:.0%}"
        step = f"{each.step_s * 1000:.1f} ms"
        line = f"{each.processes:>9}  {each.lanes:>10}  {step:>9}  {waiting:>21}  {said:<21}  {seen}"
        lines.append(line.rstrip())
    return lines


def _advice(model: "ScalingModel", predictions: "list[Prediction]") -> list[str]:
    from lockstep.observe.scaling import largest_worth_it

    lines = []
    if not model.knows_travel:
        lines.append("These are at best: one process tells nothing of how long gradients travel.")
        lines.append("Two do: plan from a run on two processes, or with --try 1,2.")
    if predictions[-1].processes == 1:
        return lines
    most = largest_worth_it(predictions)
    if most == 1:
        lines.append("Stay with one process: more would bring less than a tenth.")
    elif most < predictions[-1].processes:
        lines.append(f"Worth it up to {most} processes: the next more would bring less than a tenth.")
    else:
        lines.append(f"Worth it up to {most} processes, the most that were asked about.")
    return lines


def _useful(num_lanes: int) -> list[int]:
    """1, 2, 4 … as many as there are lanes."""
    return [1 << power for power in range(num_lanes.bit_length())]


def _numbers(option: str, text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 0 < int(part) <= _MAX_PROCESSES for part in parts):
        raise UserError(f"{option} {text[:60]}: expected numbers of processes, as in 1,2,4")
    return sorted({int(part) for part in parts})


def _measured(folder: "RunFolder") -> "Measured":
    from lockstep.observe.scaling import measured
    from lockstep.observe.timing import read_times

    return measured(read_times(folder))


def _lanes_of(folder: "RunFolder") -> int:
    fingerprint = folder.read_facts().get("fingerprint", {})
    lanes = fingerprint.get("lanes") if isinstance(fingerprint, dict) else None
    if not isinstance(lanes, int) or lanes < 1:
        raise UserError(f"{folder.path} has no lanes: a search, or a run in fast mode, cannot be planned from")
    return lanes
