"""`lockstep submit`: what a scheduler needs to start a job on many machines, written down. It is none itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from lockstep.commands.job_request import (
    JobRequest,
    Machines,
    check_grace,
    check_notice,
    check_setup,
    read_machines,
    read_time,
)
from lockstep.commands.new_file import write_new
from lockstep.commands.submitted import understand

app = typer.Typer(
    name="submit",
    help="Write the script or manifest with which Slurm or Kubernetes starts a job.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_TAKES_A_COMMAND = {"allow_interspersed_args": False}  # what follows the first word is the command's own

Command = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- train|run …", help="What each machine runs: lockstep train … or lockstep run …"),
]
Nodes = Annotated[int, typer.Option("--nodes", metavar="N", min=1, help="Machines.")]
Nproc = Annotated[
    str | None,
    typer.Option(
        "-n", "--nproc-per-node", metavar="N|MIN:MAX", help="Processes on each; default: one per GPU, else one."
    ),
]
Gpus = Annotated[int | None, typer.Option("--gpus", metavar="N", min=1, help="GPUs of each.")]
Cpus = Annotated[
    int | None, typer.Option("--cpus", metavar="N", min=1, help="Cores of each; default: one per process.")
]
MemoryOption = Annotated[str | None, typer.Option("--memory", metavar="64G", help="Memory of each.")]
StopBefore = Annotated[
    int, typer.Option("--stop-before", metavar="S", help="Seconds from SIGTERM to the kill: time to save in.")
]
Setup = Annotated[
    str | None, typer.Option("--setup", metavar="SHELL", help="Run first, as in 'source .venv/bin/activate'.")
]
Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write there; default: print it.")]
Force = Annotated[bool, typer.Option("--force", help="Write over FILE.")]


@app.command(context_settings=_TAKES_A_COMMAND)
def slurm(
    context: typer.Context,
    command: Command = None,
    nodes: Nodes = 1,
    nproc: Nproc = None,
    gpus: Gpus = None,
    cpus: Cpus = None,
    memory: MemoryOption = None,
    time: Annotated[
        str | None, typer.Option("--time", metavar="24:00:00", help="The most it may take until it is queued again.")
    ] = None,
    partition: Annotated[str | None, typer.Option("--partition", metavar="NAME", help="Slurm's.")] = None,
    account: Annotated[str | None, typer.Option("--account", metavar="NAME", help="Slurm's.")] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Default: that of what is trained.")
    ] = None,
    stop_before: StopBefore = 120,
    setup: Setup = None,
    output: Output = None,
    force: Force = False,
) -> None:
    """Write a script for sbatch: an agent on each machine, stopped in time, saved, and queued again until it is done.

    \b
    lockstep submit slurm --nodes 2 -n 4 --gpus 4 --time 24:00:00 -o job.sh -- train mine.yaml optim.lr=1e-3
    lockstep submit slurm --nodes 2 -n 4 -- run train.py --epochs 10 | sbatch

    The command is checked now, as if it were to start. The job runs in the folder that this is called in.
    """
    from lockstep.commands.sbatch_script import SlurmOptions, check_word, name_for, sbatch_script

    options = SlurmOptions(time, partition, account)
    options.check()
    if name is not None:
        check_word("--name", name)
    machines = read_machines(nodes, nproc, gpus, cpus, memory)
    check_notice(stop_before, None if time is None else read_time(time))
    job = _request(context, command, machines, stop_before, setup, lambda title: name or name_for(title))
    _write(sbatch_script(job, options, Path.cwd()), output, force=force)


@app.command(context_settings=_TAKES_A_COMMAND)
def kubernetes(
    context: typer.Context,
    image: Annotated[
        str, typer.Option("--image", metavar="IMAGE", help="With lockstep, the code and its config in it.")
    ],
    command: Command = None,
    nodes: Nodes = 1,
    nproc: Nproc = None,
    gpus: Gpus = None,
    cpus: Cpus = None,
    memory: MemoryOption = None,
    volume: Annotated[
        list[str] | None,
        typer.Option("--volume", metavar="CLAIM:/PATH", help="A volume claim for runs or data, as often as needed."),
    ] = None,
    workdir: Annotated[
        str | None, typer.Option("--workdir", metavar="/PATH", help="Folder to run in; default: the image's.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Default: that of what is trained.")
    ] = None,
    stop_before: StopBefore = 120,
    setup: Setup = None,
    output: Output = None,
    force: Force = False,
) -> None:
    """Write a manifest for kubectl: a Job with an agent in a pod for each machine, replaced until it is done.

    \b
    lockstep submit kubernetes --image me/mine:1 --nodes 2 -n 4 --gpus 4 --volume runs:/workspace/runs -o job.yaml \\
        -- train mine.yaml
    kubectl apply -f job.yaml

    The command is checked now, with the files that are here; the image must have the same.
    """
    from lockstep.commands.job_manifest import KubernetesOptions, check_label, job_manifest, label_for, read_volume

    options = KubernetesOptions(image, tuple(map(read_volume, volume or [])), workdir)
    options.check()
    if name is not None:
        check_label(name, nodes)
    machines = read_machines(nodes, nproc, gpus, cpus, memory)
    check_notice(stop_before)
    job = _request(context, command, machines, stop_before, setup, lambda title: name or label_for(title))
    _write(job_manifest(job, options), output, force=force)


def _request(
    context: typer.Context,
    command: list[str] | None,
    machines: Machines,
    stop_before: int,
    setup: str | None,
    name_of: Callable[[str], str],
) -> JobRequest:
    """What is dear comes last: to check a config takes torch."""
    check_setup(setup)
    submitted = understand(context, command or [], machines.nproc, machines.num_processes)
    check_grace(submitted.grace_s, stop_before)
    return JobRequest(name_of(submitted.title), submitted, machines, stop_before, setup)


def _write(text: str, path: Path | None, *, force: bool) -> None:
    if path is None:
        print(text, end="")
        return
    write_new(path, text, "choose another name, or write over it with --force", force=force)
    print(f"wrote {path}")
