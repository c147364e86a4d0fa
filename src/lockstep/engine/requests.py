"""What ranks ask of all ranks between two steps: a few bits, which travel with the lanes' counts. [Note: requests]

A rank that alone stopped, or saved, would leave the others waiting for it. So what one asks for goes to all in the
table that every step shares anyway, and all do it after the same step.
"""

from collections import deque
from functools import reduce
from operator import or_

import torch
from torch import Tensor

STOP = 1  # save, and end the attempt
SNAPSHOT = 2  # keep the state in memory


class Requests:
    def __init__(self) -> None:
        self._own = 0  # what this rank asks for, until it is on its way
        self._heard = 0
        self._late: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def ask(self, what: int) -> None:
        self._own |= what

    def pass_on(self) -> int:
        """What this rank asks for, to be told to all."""
        own, self._own = self._own, 0
        return own

    def hear(self, asked: Tensor) -> None:
        """What all ranks ask for, a number each; in the order of the steps."""
        if asked.is_cpu:
            self._heard |= reduce(or_, map(int, asked.tolist()), 0)
            return
        # To read it now would make the host wait for the GPU in every step: it is read when the next one is there.
        copy = torch.empty(asked.shape, dtype=asked.dtype, pin_memory=True).copy_(asked, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        self._late.append((copy, copied))

    def take(self) -> int:
        """What was asked for since the last time, the same on every rank."""
        while len(self._late) > 1:
            copy, copied = self._late.popleft()
            copied.synchronize()
            self._heard |= reduce(or_, map(int, copy.tolist()), 0)
        heard, self._heard = self._heard, 0
        return heard
