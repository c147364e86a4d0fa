"""Whether a rank, or a process that it has started, uses the CPU: a sign of life, seen from outside."""

from collections.abc import Callable
from typing import NamedTuple

from lockstep.supervision.linux_processes import tree_cpu_s

BUSY_SHARE = 0.1  # of one CPU; a process that uses less is idle

_INTERVAL_S = 0.5  # the kernel counts in hundredths of a second


class _Sample(NamedTuple):
    at: float
    cpu_s: float
    active_at: float  # when it last used the CPU


class CpuActivity:
    """When each rank last used the CPU, sampled while its heartbeat does not change."""

    def __init__(self, measure: Callable[[int], float] = tree_cpu_s) -> None:
        """`measure` returns the CPU time of a process and of what it has started."""
        self._measure = measure
        self._samples: dict[int, _Sample] = {}  # by process id

    def active_at(self, pid: int, progress_at: float, now: float) -> float:
        """Return when a rank was last active: when it made progress, or since then used the CPU.

        Nothing is sampled in the first half second after progress, so ranks with quick steps are not sampled at all.
        """
        sample = self._samples.get(pid)
        if sample is not None and sample.active_at < progress_at:
            sample = None
        if sample is not None and now - sample.at < _INTERVAL_S:
            return sample.active_at
        if now - progress_at < _INTERVAL_S:
            return progress_at
        cpu_s = self._measure(pid)
        if sample is None:
            new = _Sample(now, cpu_s, progress_at)
        else:
            is_busy = abs(cpu_s - sample.cpu_s) > BUSY_SHARE * (now - sample.at)
            new = _Sample(now, cpu_s, now if is_busy else sample.active_at)
        self._samples[pid] = new
        return new.active_at

    def mark_active(self, pid: int, now: float) -> None:
        """Record that a rank was seen to be active by other means."""
        sample = self._samples.get(pid)
        if sample is not None:
            self._samples[pid] = sample._replace(active_at=max(sample.active_at, now))

    def forget(self) -> None:
        """Forget all samples: the ranks were replaced."""
        self._samples = {}
