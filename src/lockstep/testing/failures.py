"""The errors that `ranks(n)` raises: every rank's traceback or cause of death, in the order in which they failed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.config.plurals import count_noun, number_noun


@dataclass(frozen=True, order=True)
class RankFailure:
    """How one rank failed. Sorts by time.

    Args:
        at_s: when, on the monotonic clock, which the processes of one machine share.
        rank: the rank.
        details: its traceback, or how its process died.
    """

    at_s: float
    rank: int
    details: str


class RanksFailed(Exception):
    """At least one rank raised or died. `failures` holds each rank's `RankFailure`, earliest first.

    Args:
        failures: those of the ranks that failed.
        size: the number of ranks.
        abandoned: the stacks of ranks that were stopped because others had failed, by rank.
    """

    def __init__(self, failures: Sequence[RankFailure], size: int, abandoned: Mapping[int, str]) -> None:
        self.failures = tuple(sorted(failures))
        first, *later = self.failures
        sections = [_section(f"rank {first.rank} (first to fail):", first.details)]
        sections += [_section(f"rank {failure.rank}:", failure.details) for failure in later]
        sections += [
            _section(
                f"rank {rank} did not fail; it was still running after the others had failed, and was stopped:", stack
            )
            for rank, stack in sorted(abandoned.items())
        ]
        failed = {failure.rank for failure in self.failures}
        returned = [rank for rank in range(size) if rank not in failed and rank not in abandoned]
        if returned:
            sections.append(f"returned: {number_noun('rank', returned)}")
        super().__init__(f"{len(failed)} of {size} ranks failed\n\n" + "\n\n".join(sections))


class PortTaken(RanksFailed):
    """The ranks could not join the process group: another process took the port that was picked for it."""


class RanksTimeout(Exception):
    """The call took longer than its `timeout_s`. `stacks` holds each rank's stack, by rank.

    Args:
        timeout_s: the time limit.
        stacks: each rank's stack, by rank.
        returned: the ranks that had returned from the function.
    """

    def __init__(self, timeout_s: float, stacks: Sequence[str], returned: set[int]) -> None:
        self.stacks = tuple(stacks)
        sections = [
            _section(f"rank {rank}{' (had returned; waiting for the others)' * (rank in returned)}:", stack)
            for rank, stack in enumerate(stacks)
        ]
        super().__init__(
            f"{count_noun(len(stacks), 'rank')} had not finished after {timeout_s:g} s\n\n" + "\n\n".join(sections)
        )


def _section(title: str, body: str) -> str:
    return "\n".join([title, *(f"  {line}" for line in body.rstrip().splitlines())])
