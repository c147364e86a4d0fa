"""`lockstep doctor`: is this machine fit, and how fast do its processes talk?"""

import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.config import environment
from lockstep.errors import EXIT_FAILED, LockstepError, UserError
from lockstep.launcher.plan import LaunchPlan
from lockstep.launcher.start import start

if TYPE_CHECKING:
    from lockstep.observe.health import Machine, Ranks

_FLUSHED_BYTES = 16 * 10**6
_MARKS = {"ok": "ok      ", "note": "note    ", "warning": "warning ", "problem": "PROBLEM "}


def doctor(
    nproc: Annotated[
        int | None,
        typer.Option("-n", "--nproc-per-node", metavar="N", min=2, help="Let so many processes meet and talk."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings alone, as JSON.")] = False,
) -> None:
    """Look this machine over: versions, devices, memory, disk, leftover variables; with -n, also how processes get on.

    \b
    lockstep doctor
    lockstep doctor -n 4

    Exit code 0: fit; 3: there is a problem. Warnings have their remedy beside them.
    """
    from lockstep.observe.health import examine, is_fit

    if environment.role(nproc_given=False) == "worker" and nproc is not None:
        raise UserError("lockstep doctor starts its processes itself: start it once, without a launcher")
    machine = _look()
    ranks = None if nproc is None else _probe(nproc)
    findings = examine(machine, ranks)
    if as_json:
        facts = {"machine": machine._asdict(), "ranks": None if ranks is None else ranks._asdict()}
        print(json.dumps({"fit": is_fit(findings), "findings": [f._asdict() for f in findings], **facts}, indent=1))
    else:
        for finding in findings:
            print(_MARKS[finding.level] + finding.words)
    raise typer.Exit(0 if is_fit(findings) else EXIT_FAILED)


def _look() -> "Machine":
    import torch

    from lockstep.checkpoint.memory_room import available_bytes
    from lockstep.observe.health import Machine

    shared = environment.memory_folder()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        cores=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        available_bytes=available_bytes(),
        shared_free_bytes=None if shared is None else _free_bytes(shared),
        max_open_files=_max_open_files(),
        devices=tuple(torch.cuda.get_device_name(index) for index in range(count)),
        has_gpu_without_torch=count == 0 and Path("/dev/nvidia0").exists(),
        has_mps=torch.backends.mps.is_available(),
        flush_s=_flush_s(),
        variables=environment.job_variables(),
    )


def _probe(nproc: int) -> "Ranks":
    from lockstep.observe.health import Ranks

    with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as folder:
        file = Path(folder) / "answer.json"
        code = start(LaunchPlan(nproc=nproc), ["-m", "lockstep.commands.doctor_probe", str(file)])
        if code != 0 or not file.exists():
            raise LockstepError(f"{nproc} processes could not meet, compute and send: see above (exit code {code})")
        answer = json.loads(file.read_text())
    return Ranks(**{**answer, "together_s": tuple(answer["together_s"])})


def _free_bytes(folder: Path) -> int:
    system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize


def _max_open_files() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def _flush_s() -> float | None:
    """To write so much for good in the working folder, where runs are; None if that cannot be written to."""
    try:
        with tempfile.TemporaryFile(dir=Path.cwd()) as file:
            began = time.perf_counter()
            file.write(bytes(_FLUSHED_BYTES))
            file.flush()
            os.fsync(file.fileno())
            return time.perf_counter() - began
    except OSError:
        return None
