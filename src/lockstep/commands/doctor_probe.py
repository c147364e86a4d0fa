"""A process that `lockstep doctor` starts: it meets the others, computes and sends, and tells how long it took.

Its only argument is the file that rank 0 leaves the answer in, as JSON.
"""

import json
import sys
import time
from pathlib import Path
from statistics import median

import torch

from lockstep.world.collectives import all_reduce, barrier
from lockstep.world.objects import all_gather_object
from lockstep.world.setup import leaving_at_the_end, setup_distributed
from lockstep.world.world import World

_WIDTH = 384
_PRODUCTS = 40
_REPEATS = 5
_MESSAGES = 30
_LARGE_BYTES = 16 * 2**20


def main() -> None:
    torch.set_num_threads(1)
    began = time.perf_counter()
    with leaving_at_the_end():
        world = setup_distributed()
        join_s = time.perf_counter() - began
        barrier()
        alone_s = _work(world) if world.is_main else 0.0
        barrier()
        together_s = [float(each) for each in all_gather_object(_work(world))]
        message_s = _time_sums(world, 1, _MESSAGES)
        large_s = _time_sums(world, _LARGE_BYTES // 4, _REPEATS)
        sent = 2 * (world.size - 1) / world.size * _LARGE_BYTES
        if world.is_main:
            answer = {
                "backend": world.backend,
                "device": world.device.type,
                "join_s": join_s,
                "alone_s": alone_s,
                "together_s": together_s,
                "message_s": message_s,
                "bytes_per_s": sent / large_s,
            }
            Path(sys.argv[1]).write_text(json.dumps(answer))


def _work(world: World) -> float:
    """Seconds that some products of matrices take, in the middle."""
    matrix = torch.randn(_WIDTH, _WIDTH, device=world.device)
    return median(_timed_products(matrix) for _ in range(_REPEATS))


def _timed_products(matrix: torch.Tensor) -> float:
    began = _now(matrix.device)
    for _ in range(_PRODUCTS):
        matrix @ matrix
    return _now(matrix.device) - began


def _time_sums(world: World, numbers: int, repeats: int) -> float:
    tensor = torch.ones(numbers, device=world.device)
    seconds = []
    for _ in range(repeats + 1):
        barrier()
        began = _now(world.device)
        all_reduce(tensor)
        seconds.append(_now(world.device) - began)
    return median(seconds[1:])  # the first opens connections


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main()
