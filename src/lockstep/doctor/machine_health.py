"""Judge a machine from its measurements: findings with a level and a remedy."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Literal, NamedTuple

from lockstep.config.plurals import count_noun
from lockstep.config.tested_versions import describe_untested_torch

Level = Literal["ok", "note", "warning", "problem"]

_OLDEST_TORCH = (2, 10)
_MIN_SHARED_BYTES = 256 * 2**20
_MIN_OPEN_FILES = 1024
_SLOW_FLUSH_S = 1.0
_SLOW_RATIO = 1.25  # of the time of the same work, relative to one process alone or to the other ranks
_SLOW_MESSAGE_S = 5e-3
_TYPICAL_PARAMETERS = 25_000_000

# If RANK is set, lockstep assumes that another launcher started the process as a worker.
_PLACEMENT_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_NEVER_WITHOUT_RANK = ("WORLD_SIZE", "LOCAL_RANK")


class HealthFinding(NamedTuple):
    """One line of the doctor's report."""

    level: Level
    words: str


class MachineInfo(NamedTuple):
    """What is known about a machine without starting processes."""

    system: str
    python: str
    torch: str
    cores: int  # available to this process
    available_bytes: int | None
    shared_free_bytes: int | None  # in the file system for shared memory
    max_open_files: int | None
    devices: tuple[str, ...]  # GPUs, by name
    has_gpu_without_torch: bool  # there is a driver, but torch sees no GPU
    has_mps: bool
    flush_s: float | None  # to write 16 MB in the working folder, flushed to disk; None if it is not writable
    variables: Mapping[str, str]


class ProbeResult(NamedTuple):
    """What several processes measured together."""

    backend: str
    device: str
    join_s: float
    alone_s: float  # a piece of work on rank 0, while the others are idle
    together_s: tuple[float, ...]  # the same work on every rank at the same time
    message_s: float  # of the smallest all-reduce
    bytes_per_s: float  # that each rank sends in a large all-reduce

    @property
    def slowdown(self) -> float:
        """How many times as long the work takes when all ranks do it at once."""
        return median(self.together_s) / self.alone_s


def examine_machine(machine: MachineInfo, ranks: ProbeResult | None = None) -> list[HealthFinding]:
    """Return the findings about a machine, and about the processes that were started on it, if any."""
    findings = [*_software(machine), *_resources(machine), *_environment(machine)]
    if ranks is not None:
        findings += [*_communication(ranks), *_contention(machine, ranks)]
    return findings


def is_fit(findings: Sequence[HealthFinding]) -> bool:
    """Is there no problem among the findings?"""
    return all(finding.level != "problem" for finding in findings)


def _software(machine: MachineInfo) -> Iterator[HealthFinding]:
    yield HealthFinding(
        "ok", f"{machine.system}, Python {machine.python}, torch {machine.torch}, {count_noun(machine.cores, 'core')}"
    )
    version = tuple(int(part) for part in machine.torch.split("+")[0].split(".")[:2] if part.isdecimal())
    if version < _OLDEST_TORCH:
        yield HealthFinding("problem", f"torch {machine.torch} is too old: lockstep needs 2.10 or newer")
    elif (problem := describe_untested_torch(machine.torch)) is not None:
        yield HealthFinding("note", problem)
    if machine.devices:
        gpus = f"{count_noun(len(machine.devices), 'GPU')}: {', '.join(machine.devices)}"
        yield HealthFinding("ok", f"{gpus}; use one process per GPU (-n auto)")
    elif machine.variables.get("CUDA_VISIBLE_DEVICES") == "":
        yield HealthFinding(
            "note", "CUDA_VISIBLE_DEVICES hides all GPUs: processes run on the CPU and communicate over gloo"
        )
    elif machine.has_gpu_without_torch:
        yield HealthFinding(
            "warning", "there is an NVIDIA GPU, but this torch does not see it: install torch's CUDA build"
        )
    elif machine.has_mps:
        yield HealthFinding("note", "one GPU (MPS): use one process; more would share it and gain nothing")
    else:
        yield HealthFinding("ok", "no GPU: processes run on the CPU and communicate over gloo")


def _resources(machine: MachineInfo) -> Iterator[HealthFinding]:
    if machine.available_bytes is not None:
        yield HealthFinding("ok", f"{machine.available_bytes / 1e9:.1f} GB of memory available")
    if machine.shared_free_bytes is not None and machine.shared_free_bytes < _MIN_SHARED_BYTES:
        yield HealthFinding(
            "warning",
            f"only {machine.shared_free_bytes / 2**20:.0f} MiB of shared memory is free: data workers pass samples "
            "through it, and runs keep their newest state in it (in a container, raise --shm-size)",
        )
    if machine.max_open_files is not None and machine.max_open_files < _MIN_OPEN_FILES:
        yield HealthFinding(
            "warning", f"a process may open only {machine.max_open_files} files: raise the limit with ulimit -n"
        )
    if machine.flush_s is None:
        yield HealthFinding("warning", "the working folder is not writable: choose another folder for runs with --run")
    elif machine.flush_s > _SLOW_FLUSH_S:
        yield HealthFinding(
            "note", f"writing 16 MB to disk takes {machine.flush_s:.1f} s: save less often (checkpoint.every)"
        )
    else:
        yield HealthFinding("ok", f"writing 16 MB to disk takes {machine.flush_s:.2f} s")


def _environment(machine: MachineInfo) -> Iterator[HealthFinding]:
    is_worker = "RANK" in machine.variables
    warned = [
        name for name in (_PLACEMENT_VARIABLES if is_worker else _NEVER_WITHOUT_RANK) if name in machine.variables
    ]
    if warned:
        effect = (
            ": without -n, lockstep treats this process as a worker of another launcher (unset to run alone)"
            if is_worker
            else ", but RANK is not: a launcher sets both (unset them, or -n is ignored)"
        )
        yield HealthFinding(
            "warning", f"{', '.join(warned)} {'is' if len(warned) == 1 else 'are'} set in this shell{effect}"
        )
    for name, value in sorted(machine.variables.items()):
        if name not in warned:
            yield HealthFinding("note", f"{name}={value[:80]} is set and will be respected")


def _communication(ranks: ProbeResult) -> Iterator[HealthFinding]:
    count = len(ranks.together_s)
    yield HealthFinding("ok", f"{count_noun(count, 'process')} joined over {ranks.backend} in {ranks.join_s:.1f} s")
    level: Level = "ok" if ranks.message_s < _SLOW_MESSAGE_S else "warning"
    transfer_s = 2 * (count - 1) / count * 4 * _TYPICAL_PARAMETERS / ranks.bytes_per_s
    yield HealthFinding(
        level,
        f"the smallest all-reduce takes {ranks.message_s * 1e3:.2f} ms, and each process sends "
        f"{ranks.bytes_per_s / 1e9:.2f} GB/s: gradients of {_TYPICAL_PARAMETERS // 10**6} million parameters take "
        f"{transfer_s:.2f} s per step, overlapped with the backward pass",
    )


def _contention(machine: MachineInfo, ranks: ProbeResult) -> Iterator[HealthFinding]:
    count = len(ranks.together_s)
    if ranks.device == "cpu" and count > machine.cores:
        yield HealthFinding(
            "warning", f"{count} processes share {count_noun(machine.cores, 'core')}: start at most {machine.cores}"
        )
    elif ranks.slowdown > _SLOW_RATIO:
        yield HealthFinding(
            "warning",
            f"together, each process takes {ranks.slowdown:.2f} times as long as one alone: they compete for the "
            f"machine, so {count} processes do the work of about {count / ranks.slowdown:.1f}",
        )
    else:
        yield HealthFinding("ok", f"together, each process takes {ranks.slowdown:.2f} times as long as one alone")
    for rank, seconds in enumerate(ranks.together_s):
        others = [other for index, other in enumerate(ranks.together_s) if index != rank]
        if others and seconds > _SLOW_RATIO * median(others):
            yield HealthFinding(
                "warning",
                f"rank {rank} is slow: the same work takes {seconds / median(others):.2f} times as long as on the "
                "others; give it fewer lanes (lanes_per_rank), or another device",
            )
