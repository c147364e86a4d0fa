"""Write the script for `sbatch`: one agent per machine; it stops before the time limit and is then queued again."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import UserError
from lockstep.submit.job_request import JobRequest, read_time


@dataclass(frozen=True)
class SlurmOptions:
    """Options for Slurm only."""

    time: str | None = None
    partition: str | None = None
    account: str | None = None

    def check(self) -> None:
        """Raise a `UserError` for values that Slurm would not accept."""
        if self.time is not None:
            read_time(self.time)
        for option, value in (("--partition", self.partition), ("--account", self.account)):
            if value is not None:
                check_slurm_word(option, value)


def check_slurm_word(option: str, value: str) -> None:
    """Allow only characters that need no quoting for sbatch."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.,:@+-]*", value):
        raise UserError(f"{option} {value[:60]!r}: expected letters, digits and _.,:@+-")


def slurm_name(text: str) -> str:
    """Turn a file name into a job name."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", text).lstrip(".-") or "lockstep"


def sbatch_script(job: JobRequest, options: SlurmOptions, folder: Path) -> str:
    """Return the script; `folder` is where the command was checked, and where it will run."""
    return "\n".join([*_head(job), *_directives(job, options), "", *_body(job, folder), ""])


def _head(job: JobRequest) -> list[str]:
    return [
        "#!/bin/bash",
        "# Written by `lockstep submit slurm`, for sbatch.",
        f"# Machines: {job.machines.count}; processes: {job.machines.nproc} on each.",
        f"# {job.stop_before_s} s before its time limit, Slurm asks the job to stop. It saves and is queued again.",
        "# It may resume on other machines: its run folder must be on a disk that all machines share.",
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
        "# One task per machine: the agent, which starts the processes there.",
        "#SBATCH --ntasks-per-node=1",
        "# The signal goes to the agents and their processes, not to this script, which must outlive them.",
        f"#SBATCH --signal=TERM@{job.stop_before_s}",
        "# The job is also queued again if a machine fails. All starts share one log.",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
    ]


def _body(job: JobRequest, folder: Path) -> list[str]:
    command, codes = shlex.join(job.command_line()), job.codes_to_start_again
    return [
        "set -e",
        f"cd {shlex.quote(str(folder))}",
        *([] if job.setup is None else [job.setup]),
        "",
        "# Agents exit by themselves. One may still be saving when another has exited, and must not be killed.",
        "code=0",
        f"srun --kill-on-bad-exit=0 --wait=0 --cpus-per-task={job.machines.cpus} \\",
        f"    {command} || code=$?",
        "",
        f"# {' or '.join(map(str, codes))}: stopped on request; the same job resumes later. Any other code ends it.",
        'case "$code" in',
        f"{'|'.join(map(str, codes))})",
        '    scontrol requeue "$SLURM_JOB_ID" || echo "not queued again: submit this script again to resume" >&2 ;;',
        "esac",
        'exit "$code"',
    ]
