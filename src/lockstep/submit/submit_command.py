"""`lockstep submit`: write the sbatch script or Kubernetes manifest that starts a job on many machines."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from lockstep.command_line.output_paths import write_new_file
from lockstep.submit.job_request import (
    JobRequest,
    Machines,
    check_grace,
    check_notice,
    check_setup,
    read_command,
    read_machines,
    read_time,
)
from lockstep.terminal_text import print_line

app = typer.Typer(
    name="submit",
    help="Write the script or manifest with which Slurm or Kubernetes starts a job.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_TAKES_A_COMMAND = {"allow_interspersed_args": False}  # everything after the first word belongs to the command

Command = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- train|run …", help="The command for each machine: train … or run …"),
]
Nodes = Annotated[int, typer.Option("--nodes", metavar="N", min=1, help="Number of machines.")]
Nproc = Annotated[
    str | None,
    typer.Option(
        "-n", "--nproc-per-node", metavar="N|MIN:MAX", help="Processes per machine; default: one per GPU, or one."
    ),
]
Gpus = Annotated[int | None, typer.Option("--gpus", metavar="N", min=1, help="GPUs per machine.")]
Cpus = Annotated[
    int | None, typer.Option("--cpus", metavar="N", min=1, help="Cores per machine; default: one per process.")
]
MemoryOption = Annotated[str | None, typer.Option("--memory", metavar="64G", help="Memory per machine.")]
StopBefore = Annotated[
    int, typer.Option("--stop-before", metavar="S", help="Seconds between SIGTERM and the kill, for saving.")
]
Setup = Annotated[
    str | None, typer.Option("--setup", metavar="SHELL", help="Shell to run first, as in 'source .venv/bin/activate'.")
]
Output = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="FILE", help="File to write; default: standard output.")
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite FILE.")]


@app.command(context_settings=_TAKES_A_COMMAND, short_help="Write a script for sbatch.")
def slurm(
    context: typer.Context,
    command: Command = None,
    nodes: Nodes = 1,
    nproc: Nproc = None,
    gpus: Gpus = None,
    cpus: Cpus = None,
    memory: MemoryOption = None,
    time: Annotated[
        str | None, typer.Option("--time", metavar="24:00:00", help="Time limit, after which the job is queued again.")
    ] = None,
    partition: Annotated[str | None, typer.Option("--partition", metavar="NAME", help="Slurm partition.")] = None,
    account: Annotated[str | None, typer.Option("--account", metavar="NAME", help="Slurm account.")] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name of the job; default: after what is trained.")
    ] = None,
    stop_before: StopBefore = 120,
    setup: Setup = None,
    output: Output = None,
    force: Force = False,
) -> None:
    """Write a script for sbatch. The job saves and stops before its time limit, and is queued again until it is done.

    \b
    lockstep submit slurm --nodes 2 -n 4 --gpus 4 --time 24:00:00 -o job.sh -- train mine.yaml optim.lr=1e-3
    lockstep submit slurm --nodes 2 -n 4 -- run train.py --epochs 10 | sbatch

    The command is checked now, as if it were about to start. The job runs in the current folder.
    """
    from lockstep.submit.sbatch_script import SlurmOptions, check_slurm_word, sbatch_script, slurm_name

    options = SlurmOptions(time, partition, account)
    options.check()
    if name is not None:
        check_slurm_word("--name", name)
    machines = read_machines(nodes, nproc, gpus, cpus, memory)
    check_notice(stop_before, None if time is None else read_time(time))
    job = _request(context, command, machines, stop_before, setup, lambda title: name or slurm_name(title))
    _write(sbatch_script(job, options, Path.cwd()), output, force=force)


@app.command(context_settings=_TAKES_A_COMMAND, short_help="Write a manifest for kubectl.")
def kubernetes(
    context: typer.Context,
    image: Annotated[
        str, typer.Option("--image", metavar="IMAGE", help="Container image with lockstep, your code and its config.")
    ],
    command: Command = None,
    nodes: Nodes = 1,
    nproc: Nproc = None,
    gpus: Gpus = None,
    cpus: Cpus = None,
    memory: MemoryOption = None,
    volume: Annotated[
        list[str] | None,
        typer.Option("--volume", metavar="CLAIM:/PATH", help="Mount a volume claim for runs or data; repeatable."),
    ] = None,
    workdir: Annotated[
        str | None, typer.Option("--workdir", metavar="/PATH", help="Working folder; default: the image's.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name of the job; default: after what is trained.")
    ] = None,
    stop_before: StopBefore = 120,
    setup: Setup = None,
    output: Output = None,
    force: Force = False,
) -> None:
    """Write a manifest for kubectl: a Job with one pod per machine; pods are replaced until the job is done.

    \b
    lockstep submit kubernetes --image me/mine:1 --nodes 2 -n 4 --gpus 4 --volume runs:/workspace/runs -o job.yaml \\
        -- train mine.yaml
    kubectl apply -f job.yaml

    The command is checked now, with the files in the current folder; the image must contain the same files.
    """
    from lockstep.submit.kubernetes_job import (
        KubernetesOptions,
        check_kubernetes_name,
        job_manifest,
        kubernetes_name,
        read_volume,
    )

    options = KubernetesOptions(image, tuple(map(read_volume, volume or [])), workdir)
    options.check()
    if name is not None:
        check_kubernetes_name(name, nodes)
    machines = read_machines(nodes, nproc, gpus, cpus, memory)
    check_notice(stop_before)
    job = _request(context, command, machines, stop_before, setup, lambda title: name or kubernetes_name(title))
    _write(job_manifest(job, options), output, force=force)


def _request(
    context: typer.Context,
    command: list[str] | None,
    machines: Machines,
    stop_before: int,
    setup: str | None,
    name_of: Callable[[str], str],
) -> JobRequest:
    """Build the job. The command is checked last, because checking a config imports torch."""
    check_setup(setup)
    submitted = read_command(context, command or [], machines)
    check_grace(submitted.grace_s, stop_before)
    return JobRequest(name_of(submitted.title), submitted, machines, stop_before, setup)


def _write(text: str, path: Path | None, *, force: bool) -> None:
    if path is None:
        print(text, end="")
        return
    write_new_file(path, text, "choose another name, or overwrite it with --force", force=force)
    print_line(f"wrote {path}")
