"""The models and training loops that `lockstep bench` can measure, by name.

Imports nothing heavy: the command's `--help` lists these.
"""

from collections.abc import Sequence
from typing import NamedTuple

from lockstep.config.plurals import count_noun

HAND_WRITTEN = "hand-written"  # the baseline of all ratios
AGAIN = "again"  # the baseline once more: shows how noisy the machine is


class BenchModel(NamedTuple):
    """A built-in model, with its default sizes."""

    description: str
    batch: int  # over all processes
    steps: int  # per round


BENCH_MODELS = {
    "mlp": BenchModel("a perceptron of 0.15 million parameters", 64, 50),
    "tiny": BenchModel("a perceptron so small that the overhead around it dominates", 32, 100),
    "conv": BenchModel("a small convolutional network on 32 × 32 images", 32, 10),
    "gpt": BenchModel("a small transformer on sequences of 32 tokens", 16, 10),
}


class Peer(NamedTuple):
    """Another library to compare with."""

    title: str
    package: str  # must be installed


PEERS = {"accelerate": Peer("Accelerate", "accelerate"), "fabric": Peer("Fabric", "lightning")}

# The names that `--against` accepts.
CONTENDERS = ("lockstep", "fast", "dataloader", *PEERS)


class Contender(NamedTuple):
    """One way to train: a row of the table."""

    name: str  # unique; also names its files
    title: str
    loop: str  # a key of `contender_loops.LOOPS`
    lanes: int | None = None  # in lockstep mode

    def can_run_on(self, processes: int) -> bool:
        """Is there a lane for every process?"""
        return self.lanes is None or processes <= self.lanes


def make_contenders(names: Sequence[str], titles: dict[str, str], lane_counts: Sequence[int]) -> list[Contender]:
    """Build the rows of the table: the baseline twice, then the chosen contenders.

    Args:
        names: which of `CONTENDERS` to include.
        titles: titles for peers, with their versions.
        lane_counts: the numbers of lanes to use in lockstep mode.
    """
    rows = [
        Contender(HAND_WRITTEN, "hand-written (DDP on several)", HAND_WRITTEN),
        Contender(AGAIN, "the same again", HAND_WRITTEN),
        Contender("dataloader", "hand-written, with a DataLoader", "dataloader"),
        *(Contender(f"lockstep-{n}", f"lockstep, {count_noun(n, 'lane')}", "lockstep", n) for n in lane_counts),
        Contender("fast", "lockstep, fast mode", "fast"),
        *(Contender(name, titles.get(name, peer.title), name) for name, peer in PEERS.items()),
    ]
    return [row for row in rows if row.loop in (HAND_WRITTEN, *names)]


def fewest_lanes(processes: int) -> int:
    """Return the smallest number of lanes that `processes` can share: a power of two."""
    return 1 << (processes - 1).bit_length()
