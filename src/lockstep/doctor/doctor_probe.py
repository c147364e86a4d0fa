"""The program that `lockstep doctor -n` runs in each process: it times compute and all-reduce.

Its only argument is the file to which rank 0 writes the result as JSON.
"""

import json
import sys
import time
from pathlib import Path
from statistics import median

import torch

from lockstep.world.collectives import all_reduce, barrier
from lockstep.world.object_collectives import all_gather_object
from lockstep.world.process_group import leave_on_exit, setup_distributed
from lockstep.world.script_process import choose_threads
from lockstep.world.world import World

_MATRIX_WIDTH = 384
_NUM_PRODUCTS = 40
_NUM_REPEATS = 5
_NUM_SMALL_SUMS = 30
_LARGE_BYTES = 16 * 2**20


def main() -> None:
    """Join the other processes, measure, and write the result on rank 0."""
    choose_threads(1)
    began = time.perf_counter()
    with leave_on_exit():
        world = setup_distributed()
        join_s = time.perf_counter() - began
        barrier()
        alone_s = _time_work(world) if world.is_main else 0.0
        barrier()
        together_s = [float(each) for each in all_gather_object(_time_work(world))]
        message_s = _time_all_reduce(world, 1, _NUM_SMALL_SUMS)
        large_s = _time_all_reduce(world, _LARGE_BYTES // 4, _NUM_REPEATS)
        sent_bytes = 2 * (world.size - 1) / world.size * _LARGE_BYTES
        if world.is_main:
            result = {
                "backend": world.backend,
                "device": world.device.type,
                "join_s": join_s,
                "alone_s": alone_s,
                "together_s": together_s,
                "message_s": message_s,
                "bytes_per_s": sent_bytes / large_s,
            }
            Path(sys.argv[1]).write_text(json.dumps(result))


def _time_work(world: World) -> float:
    """Return the median time of a fixed amount of matrix products."""
    matrix = torch.randn(_MATRIX_WIDTH, _MATRIX_WIDTH, device=world.device)
    return median(_time_products(matrix) for _ in range(_NUM_REPEATS))


def _time_products(matrix: torch.Tensor) -> float:
    began = _now(matrix.device)
    for _ in range(_NUM_PRODUCTS):
        matrix @ matrix
    return _now(matrix.device) - began


def _time_all_reduce(world: World, num_elements: int, num_repeats: int) -> float:
    """Return the median time of an all-reduce."""
    tensor = torch.ones(num_elements, device=world.device)
    times_s = []
    for _ in range(num_repeats + 1):
        barrier()
        began = _now(world.device)
        all_reduce(tensor)
        times_s.append(_now(world.device) - began)
    return median(times_s[1:])  # the first opens connections


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main()
