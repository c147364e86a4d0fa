"""What can be measured, and against what. Nothing heavy is imported here: the command's `--help` lists it."""

from collections.abc import Sequence
from typing import NamedTuple

HAND_WRITTEN, AGAIN = "hand-written", "again"  # what all others are compared with, and with itself


class Model(NamedTuple):
    words: str
    batch: int  # over all processes, unless the user says otherwise
    steps: int  # of a round


MODELS = {
    "mlp": Model("a perceptron of 0.15 million parameters", 64, 50),
    "tiny": Model("a perceptron so small that what is around it takes most of the time", 32, 100),
    "conv": Model("a small convolutional network, on images of 32 × 32", 32, 10),
    "gpt": Model("a small transformer, on texts of 32 tokens", 16, 10),
}


class Peer(NamedTuple):
    title: str
    package: str  # that must be installed


PEERS = {"accelerate": Peer("Accelerate", "accelerate"), "fabric": Peer("Fabric", "lightning")}

# By the names that a user chooses them by.
CONTENDERS = ("lockstep", "fast", "dataloader", *PEERS)


class Entry(NamedTuple):
    """A row of the table: one way to train."""

    name: str  # and its files'
    title: str
    loop: str  # which of the loops; see `loops`
    lanes: int | None = None  # of lockstep mode

    def can_run_on(self, processes: int) -> bool:
        return self.lanes is None or processes <= self.lanes


def entries(contenders: Sequence[str], titles: dict[str, str], all_lanes: Sequence[int]) -> list[Entry]:
    """Rows for these contenders; `titles` of peers, and `all_lanes` that lockstep mode is tried with."""
    rows = [
        Entry(HAND_WRITTEN, "hand-written (DDP on several)", HAND_WRITTEN),
        Entry(AGAIN, "the same again", HAND_WRITTEN),
        Entry("dataloader", "hand-written, with a DataLoader", "dataloader"),
        *(Entry(f"lockstep-{n}", f"lockstep, {n} lane{'s' * (n > 1)}", "lockstep", n) for n in all_lanes),
        Entry("fast", "lockstep, fast mode", "fast"),
        *(Entry(name, titles.get(name, peer.title), name) for name, peer in PEERS.items()),
    ]
    return [row for row in rows if row.loop in (HAND_WRITTEN, *contenders)]


def lanes_for(processes: int) -> int:
    """The fewest lanes that so many processes can share: a power of two."""
    return 1 << (processes - 1).bit_length()
