"""The surrogate network on several ranks: the same bits on any number of ranks, also when resumed on another number."""

from typing import Any

from lockstep.engine.state_digest import digest, named_tensors
from lockstep.search.surrogate import Surrogate
from lockstep.search.surrogate_network import NetworkSettings
from lockstep.testing import ranks
from lockstep.world.keyed_random import keyed_generator
from lockstep.world.world import World
from tests.unit.search.guided import GENOME, filled

SETTINGS = NetworkSettings(steps=6, global_batch=32, lanes=2, members=2, width=16)


def train(world: World, generations: list[int], state: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """Return the digest of what was chosen and learned, and the state."""
    surrogate = Surrogate(GENOME, 1, SETTINGS, world, seed=4)
    if state is not None:
        surrogate.load_state_dict(state)
    archive = filled(40, 40, 40, failed=[3, 50])
    reports = [surrogate.train(archive, generation) for generation in generations]
    candidates = GENOME.sample(surrogate.num_candidates(20, 3), keyed_generator(0, "candidates"))
    chosen = surrogate.choose(candidates, archive, archive.designs[10:20], archive.costs[10:20], 20, 3)
    after = surrogate.state_dict()
    surrogate.close()
    return digest(named_tensors([reports[-1], chosen, after], "guide")), after


def test_it_is_the_same_on_any_number_of_ranks() -> None:
    """With 3, more than there are lanes, each trains by itself."""
    digests = {found for number in (1, 2, 3) for found, _ in ranks(number).run(train, [0, 1])}
    assert len(digests) == 1


def test_it_resumes_on_another_number_of_ranks() -> None:
    (whole, _), *_ = ranks(1).run(train, [0, 1])
    (_, state), *_ = ranks(2).run(train, [0])
    assert {found for found, _ in ranks(3).run(train, [1], state)} == {whole}
