"""The script that `sbatch` takes: one agent on each machine, asked to stop in time, queued again if it was stopped."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from lockstep.commands.job_request import JobRequest, read_time
from lockstep.errors import EXIT_STOPPED, UserError


@dataclass(frozen=True)
class SlurmOptions:
    """What only Slurm asks for."""

    time: str | None = None
    partition: str | None = None
    account: str | None = None

    def check(self) -> None:
        if self.time is not None:
            read_time(self.time)
        for option, value in (("--partition", self.partition), ("--account", self.account)):
            if value is not None:
                check_word(option, value)


def check_word(option: str, value: str) -> None:
    """sbatch has quotes of its own; words of these characters need none."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.,:@+-]*", value):
        raise UserError(f"{option} {value[:60]!r}: expected letters, digits and _.,:@+-")


def name_for(text: str) -> str:
    """A job's name after a file's."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", text).lstrip(".-") or "lockstep"


def sbatch_script(job: JobRequest, options: SlurmOptions, folder: Path) -> str:
    """`folder`: where the command was checked, and is to run."""
    return "\n".join([*_head(job), *_directives(job, options), "", *_body(job, folder), ""])


def _head(job: JobRequest) -> list[str]:
    return [
        "#!/bin/bash",
        "# Written by `lockstep submit slurm`, for sbatch.",
        f"# Machines: {job.machines.count}; processes: {job.machines.nproc} on each.",
        f"# {job.stop_before_s} s before its time is over, Slurm asks the job to stop. It saves, and is queued again.",
        "# Then it may go on elsewhere: the folder of its run must be on a disk that all machines see.",
        "",
    ]


def _directives(job: JobRequest, options: SlurmOptions) -> list[str]:
    machines = job.machines
    values = {
        "job-name": job.name,
        "partition": options.partition,
        "account": options.account,
        "nodes": machines.count,
        "cpus-per-task": machines.cpus,
        "gpus-per-node": machines.gpus,
        "mem": None if machines.memory is None else f"{machines.memory.amount}{machines.memory.unit}",
        "time": options.time,
    }
    return [
        *(f"#SBATCH --{name}={value}" for name, value in values.items() if value is not None),
        "# A task is the agent of a machine, which starts the processes there.",
        "#SBATCH --ntasks-per-node=1",
        "# To the agents and their processes, not to this script, which must outlive them.",
        f"#SBATCH --signal=TERM@{job.stop_before_s}",
        "# Also after a machine has failed. One log for all starts.",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
    ]


def _body(job: JobRequest, folder: Path) -> list[str]:
    command = shlex.join(job.words())
    return [
        "set -e",
        f"cd {shlex.quote(str(folder))}",
        *([] if job.setup is None else [job.setup]),
        "",
        "# Agents end by themselves. One may still be saving when another has ended: it is not killed for that.",
        "code=0",
        f"srun --kill-on-bad-exit=0 --wait=0 --cpus-per-task={job.machines.cpus} \\",
        f"    {command} || code=$?",
        "",
        f"# {EXIT_STOPPED}: stopped on request, and saved: the same job goes on later. Any other code is its end.",
        f'if [ "$code" -eq {EXIT_STOPPED} ]; then',
        '    scontrol requeue "$SLURM_JOB_ID" || echo "not queued again: start this script once more to go on" >&2',
        "fi",
        'exit "$code"',
    ]
