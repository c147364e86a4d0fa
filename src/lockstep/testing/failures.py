"""How a failed call is told: every rank's own account, the likely culprit's first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class RankFailure:
    """One rank's end: `account` is its traceback, or what its process died of. Sorts by time."""

    at_s: float  # on the monotonic clock, which the processes of one machine share
    rank: int
    account: str


class RanksFailed(Exception):
    """At least one rank raised or died. `failures` holds them, earliest first."""

    def __init__(self, failures: Sequence[RankFailure], size: int, abandoned: Mapping[int, str]) -> None:
        self.failures = tuple(sorted(failures))
        first, *later = self.failures
        sections = [_section(f"rank {first.rank} (first to fail):", first.account)]
        sections += [_section(f"rank {failure.rank}:", failure.account) for failure in later]
        sections += [
            _section(f"rank {rank} did not fail; still busy after the others had, it was stopped here:", stack)
            for rank, stack in sorted(abandoned.items())
        ]
        failed = {failure.rank for failure in self.failures}
        returned = [str(rank) for rank in range(size) if rank not in failed and rank not in abandoned]
        if returned:
            sections.append(f"returned: rank{'s' * (len(returned) > 1)} {', '.join(returned)}")
        super().__init__(f"{len(failed)} of {size} ranks failed\n\n" + "\n\n".join(sections))


class PortTaken(RanksFailed):
    """The ranks could not meet: somebody else got the port that the caller had picked for them."""


class RanksTimeout(Exception):
    """The call took longer than its `timeout_s`. `stacks` holds where each rank was, by rank."""

    def __init__(self, timeout_s: float, stacks: Sequence[str], returned: set[int]) -> None:
        self.stacks = tuple(stacks)
        sections = [
            _section(f"rank {rank}{' (had returned; waiting for the others)' * (rank in returned)}:", stack)
            for rank, stack in enumerate(stacks)
        ]
        super().__init__(f"{len(stacks)} ranks were not done after {timeout_s:g} s\n\n" + "\n\n".join(sections))


def _section(title: str, body: str) -> str:
    return "\n".join([title, *(f"  {line}" for line in body.rstrip().splitlines())])
