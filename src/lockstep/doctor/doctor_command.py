"""`lockstep doctor`: check this machine, and how fast its processes communicate."""

import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.command_line.trial_runs import require_no_launcher
from lockstep.config import environment
from lockstep.errors import EXIT_FAILED, LockstepError
from lockstep.launcher.launch_plan import LaunchPlan, start_agent
from lockstep.supervision.linux_processes import available_cores
from lockstep.terminal_text import print_line

if TYPE_CHECKING:
    from lockstep.doctor.machine_health import MachineInfo, ProbeResult

_WRITTEN_BYTES = 16 * 10**6
_MARKS = {"ok": "ok      ", "note": "note    ", "warning": "warning ", "problem": "PROBLEM "}


def doctor(
    nproc: Annotated[
        int | None,
        typer.Option("-n", "--nproc-per-node", metavar="N", min=2, help="Also start and measure N processes."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the findings, as JSON.")] = False,
) -> None:
    """Check this machine: versions, devices, memory, disk, environment variables; with -n, also N processes together.

    \b
    lockstep doctor
    lockstep doctor -n 4

    Exit code 0: ready for training; 3: there is a problem. Each warning names its remedy.
    """
    from lockstep.doctor.machine_health import examine_machine, is_fit

    if nproc is not None:
        require_no_launcher("doctor")
    machine = _inspect_machine()
    ranks = None if nproc is None else _probe(nproc)
    findings = examine_machine(machine, ranks)
    if as_json:
        values = {
            "fit": is_fit(findings),
            "findings": [finding._asdict() for finding in findings],
            "machine": machine._asdict(),
            "ranks": None if ranks is None else ranks._asdict(),
        }
        print(json.dumps(values, indent=1))
    else:
        for finding in findings:
            print_line(_MARKS[finding.level] + finding.words)
    raise typer.Exit(0 if is_fit(findings) else EXIT_FAILED)


def _inspect_machine() -> "MachineInfo":
    import torch

    from lockstep.checkpoint.available_memory import available_memory_bytes
    from lockstep.doctor.machine_health import MachineInfo

    shared = environment.shared_memory_root()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return MachineInfo(
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        cores=available_cores(),
        available_bytes=available_memory_bytes(),
        shared_free_bytes=None if shared is None else _free_bytes(shared),
        max_open_files=_max_open_files(),
        devices=tuple(torch.cuda.get_device_name(index) for index in range(count)),
        has_gpu_without_torch=count == 0 and Path("/dev/nvidia0").exists(),
        has_mps=torch.backends.mps.is_available(),
        flush_s=_flush_s(),
        variables=environment.job_variables(),
    )


def _probe(nproc: int) -> "ProbeResult":
    from lockstep.doctor.machine_health import ProbeResult

    with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as folder:
        file = Path(folder) / "result.json"
        code = start_agent(LaunchPlan(nproc=nproc), ["-m", "lockstep.doctor.doctor_probe", str(file)])
        if code != 0 or not file.exists():
            raise LockstepError(
                f"{nproc} processes could not join and communicate: see the messages above (exit code {code})"
            )
        result = json.loads(file.read_text())
    return ProbeResult(**{**result, "together_s": tuple(result["together_s"])})


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
    """Time writing to the disk of the working folder, where runs are; None if it is not writable."""
    try:
        with tempfile.TemporaryFile(dir=Path.cwd()) as file:
            began = time.perf_counter()
            file.write(bytes(_WRITTEN_BYTES))
            file.flush()
            os.fsync(file.fileno())
            return time.perf_counter() - began
    except OSError:
        return None
