"""When a rank last used the CPU, as sampled from outside."""

import os
import subprocess
import sys

from lockstep.supervision.cpu_activity import CpuActivity
from lockstep.supervision.linux_processes import tree_cpu_s


def test_idle_time_counts_from_the_last_use_of_the_cpu() -> None:
    used_s = 0.0
    activity = CpuActivity(lambda _: used_s)
    assert activity.active_at(7, 100.0, 103.0) == 100.0
    assert activity.active_at(7, 100.0, 104.0) == 100.0
    used_s = 0.05  # a twentieth of the CPU
    assert activity.active_at(7, 100.0, 105.0) == 100.0
    used_s = 0.5
    assert activity.active_at(7, 100.0, 106.0) == 106.0
    assert activity.active_at(7, 100.0, 107.0) == 106.0
    assert activity.active_at(7, 110.0, 111.0) == 110.0, "progress"
    activity.mark_active(7, 112.0)
    assert activity.active_at(7, 110.0, 113.0) == 112.0


def test_ranks_with_quick_steps_are_not_sampled() -> None:
    samples: list[int] = []
    activity = CpuActivity(lambda pid: samples.append(pid) or 0.0)
    for tenth in range(100):
        now = 100 + tenth / 10
        assert activity.active_at(7, now - 0.3, now) == now - 0.3
    assert samples == []
    for tenth in range(100):
        activity.active_at(7, 110.0, 110 + tenth / 10)
    assert 15 < len(samples) <= 20, "twice a second"


def test_child_processes_count_also_after_they_have_ended() -> None:
    burn = "import sys, time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\nsys.stdin.read()"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    with subprocess.Popen([sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert tree_cpu_s(process.pid) > 0.2, "of a grandchild"
    assert tree_cpu_s(os.getpid()) > 0.2, "of processes that were waited for"
    assert tree_cpu_s(process.pid) == 0.0
