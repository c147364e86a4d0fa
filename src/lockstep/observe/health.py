"""Is this machine fit to train on? What its facts mean, in words, with the remedy."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Literal, NamedTuple

Level = Literal["ok", "note", "warning", "problem"]

_OLDEST_TORCH = (2, 10)
_LITTLE_SHARED_BYTES = 256 * 2**20
_FEW_FILES = 1024
_SLOW_FLUSH_S = 1.0
_SLOWED_DOWN = 1.25  # times as long together as alone, or as the others
_SLOW_MESSAGE_S = 5e-3
_TYPICAL_PARAMETERS = 25_000_000

# With RANK among them, lockstep takes a process for a worker of somebody else's job.
_PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_NEVER_WITHOUT_RANK = ("WORLD_SIZE", "LOCAL_RANK")


class Finding(NamedTuple):
    level: Level
    words: str


class Machine(NamedTuple):
    """What is known without starting any process."""

    system: str
    python: str
    torch: str
    cores: int  # that this process may use
    available_bytes: int | None
    shared_free_bytes: int | None  # where files lie in memory
    max_open_files: int | None
    devices: tuple[str, ...]  # GPUs, by name
    has_gpu_without_torch: bool  # the driver is there, and torch was built without it
    has_mps: bool
    flush_s: float | None  # to write 16 MB to the disk, for good, in the working folder
    variables: Mapping[str, str]


class Ranks(NamedTuple):
    """What several processes have measured together."""

    backend: str
    device: str
    join_s: float
    alone_s: float  # a piece of work on rank 0, while the others rest
    together_s: tuple[float, ...]  # the same on every rank, all at once
    message_s: float  # of the smallest sum over all ranks
    bytes_per_s: float  # of a large one, on each rank

    @property
    def slowed_down(self) -> float:
        return median(self.together_s) / self.alone_s


def examine(machine: Machine, ranks: Ranks | None = None) -> list[Finding]:
    findings = [*_software(machine), *_room(machine), *_environment(machine)]
    if ranks is not None:
        findings += [*_meeting(ranks), *_crowding(machine, ranks)]
    return findings


def is_fit(findings: Sequence[Finding]) -> bool:
    return all(finding.level != "problem" for finding in findings)


def _software(machine: Machine) -> Iterator[Finding]:
    yield Finding("ok", f"{machine.system}, Python {machine.python}, torch {machine.torch}, {machine.cores} cores")
    version = tuple(int(part) for part in machine.torch.split("+")[0].split(".")[:2] if part.isdecimal())
    if version < _OLDEST_TORCH:
        yield Finding("problem", f"torch {machine.torch} is too old: lockstep needs 2.10 or newer")
    if machine.devices:
        yield Finding("ok", f"{len(machine.devices)} GPU(s): {', '.join(machine.devices)}; one process each (-n auto)")
    elif machine.variables.get("CUDA_VISIBLE_DEVICES") == "":
        yield Finding("note", "GPUs are hidden by CUDA_VISIBLE_DEVICES: processes compute on the CPU, over gloo")
    elif machine.has_gpu_without_torch:
        yield Finding("warning", "there is an NVIDIA GPU, but this torch does not see it: install torch's CUDA build")
    elif machine.has_mps:
        yield Finding("note", "one GPU, by MPS: one process uses it; several bring no parallelism")
    else:
        yield Finding("ok", "no GPU: processes compute on the CPU and talk over gloo")


def _room(machine: Machine) -> Iterator[Finding]:
    if machine.available_bytes is not None:
        yield Finding("ok", f"{machine.available_bytes / 1e9:.1f} GB of memory are available")
    if machine.shared_free_bytes is not None and machine.shared_free_bytes < _LITTLE_SHARED_BYTES:
        yield Finding(
            "warning",
            f"shared memory has {machine.shared_free_bytes / 2**20:.0f} MiB free: data workers hand samples over there "
            "and runs keep their newest state (in a container, raise --shm-size)",
        )
    if machine.max_open_files is not None and machine.max_open_files < _FEW_FILES:
        yield Finding("warning", f"a process may open {machine.max_open_files} files only: raise it with ulimit -n")
    if machine.flush_s is None:
        yield Finding("warning", "the working folder cannot be written to: choose another for runs with --run")
    elif machine.flush_s > _SLOW_FLUSH_S:
        yield Finding("note", f"the disk takes {machine.flush_s:.1f} s for 16 MB: save less often (checkpoint.every)")
    else:
        yield Finding("ok", f"the disk takes {machine.flush_s:.2f} s for 16 MB, flushed")


def _environment(machine: Machine) -> Iterator[Finding]:
    is_worker = "RANK" in machine.variables
    warned = [name for name in (_PLACES if is_worker else _NEVER_WITHOUT_RANK) if name in machine.variables]
    if warned:
        what = (
            "without -n, a process takes itself for one worker of a job that somebody else started (unset to run alone)"
            if is_worker
            else "but RANK is not: a launcher sets both (unset, or -n is not heeded)"
        )
        yield Finding("warning", f"{', '.join(warned)} {'is' if len(warned) == 1 else 'are'} set in this shell, {what}")
    for name, value in sorted(machine.variables.items()):
        if name not in warned:
            yield Finding("note", f"{name}={value[:80]} is set and will be kept to")


def _meeting(ranks: Ranks) -> Iterator[Finding]:
    count = len(ranks.together_s)
    yield Finding("ok", f"{count} processes met over {ranks.backend} in {ranks.join_s:.1f} s")
    level: Level = "ok" if ranks.message_s < _SLOW_MESSAGE_S else "warning"
    travel_s = 2 * (count - 1) / count * 4 * _TYPICAL_PARAMETERS / ranks.bytes_per_s
    yield Finding(
        level,
        f"the smallest message takes {ranks.message_s * 1e3:.2f} ms, and each process sends "
        f"{ranks.bytes_per_s / 1e9:.2f} GB/s: gradients of {_TYPICAL_PARAMETERS // 10**6} million parameters "
        f"travel for {travel_s:.2f} s a step, behind the backward pass as far as that reaches",
    )


def _crowding(machine: Machine, ranks: Ranks) -> Iterator[Finding]:
    count = len(ranks.together_s)
    if ranks.device == "cpu" and count > machine.cores:
        yield Finding("warning", f"{count} processes share {machine.cores} cores: start at most {machine.cores}")
    elif ranks.slowed_down > _SLOWED_DOWN:
        yield Finding(
            "warning",
            f"together, each process takes {ranks.slowed_down:.2f} times as long as one alone: they are in each "
            f"other's way, and {count} are worth about {count / ranks.slowed_down:.1f}",
        )
    else:
        yield Finding("ok", f"together, each process takes {ranks.slowed_down:.2f} times as long as one alone")
    for rank, seconds in enumerate(ranks.together_s):
        others = [other for place, other in enumerate(ranks.together_s) if place != rank]
        if others and seconds > _SLOWED_DOWN * median(others):
            yield Finding(
                "warning",
                f"rank {rank} is slow: {seconds / median(others):.2f} times as long as the others for the same work; "
                "give it fewer lanes (lanes_per_rank), or another device",
            )
