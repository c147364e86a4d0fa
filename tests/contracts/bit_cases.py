"""The runs whose bits are compared: every workload, with settings under which a mistake would show."""

from typing import Any, NamedTuple

from lockstep.testing import ranks
from tests.contracts.workloads import WORKLOADS, Trained, train


class Case(NamedTuple):
    name: str
    loader: dict[str, Any]
    options: dict[str, Any] = {}  # noqa: RUF012
    steps: int = 5


# Not a power of two: dividing by one is exact in any precision, and would hide mistakes.
LOADER = {"global_batch": 40, "lanes": 8}


RULES = {"average": "mean", "newest": "first", "high*": "max"}


CASES = {
    **{name: Case(name, LOADER) for name in WORKLOADS},
    "remembering": Case("remembering", LOADER, {"buffers": RULES}),
    # Its fourth step is the one with empty lanes, and the last, so that what it leaves is what is compared.
    "remembering with empty lanes": Case(
        "remembering", {"global_batch": 48, "lanes": 8, "tail": "short"}, {"buffers": RULES}, steps=4
    ),
    "clipped": Case("gpt", LOADER, {"clip_norm": 0.05}),
    "clipped gan": Case("gan", LOADER, {"clip_norm": 0.01}),
    "as many lanes as processes": Case("conv", {"global_batch": 36, "lanes": 4}),
    "sixteen lanes": Case("mlp", {"global_batch": 48, "lanes": 16}),
    # 150 samples in batches of 64: the third batch of an epoch has 22, its lanes 2 or 3.
    "a short last batch": Case("conv", {"global_batch": 64, "lanes": 8, "tail": "short"}),
    # 150 in batches of 48: 6 left over for 8 lanes, so that two are empty. Of 146, 2: whole ranks have no sample.
    "empty lanes": Case("conv", {"global_batch": 48, "lanes": 8, "tail": "short"}),
    "empty lanes and two terms": Case("terms", {"global_batch": 48, "lanes": 8, "tail": "short"}),
    "empty lanes and unused parameters": Case("awkward", {"global_batch": 48, "lanes": 8, "tail": "short"}),
    # Lanes of two rows: some have no valid target.
    "lanes without a target": Case("gpt", {"global_batch": 16, "lanes": 8}),
}


def digests(case: Case, num_ranks: int, **more: Any) -> Trained:
    results = ranks(num_ranks).run(train, case.name, case.steps, case.loader | more, **case.options)
    assert all(result == results[0] for result in results), "ranks differ among themselves"
    return results[0]


def digests_alone(case: Case) -> Trained:
    """Return the digests of a run on one process; it is trained once per session."""
    if repr(case) not in _ALONE:
        _ALONE[repr(case)] = digests(case, 1)
    return _ALONE[repr(case)]


_ALONE: dict[str, Trained] = {}


def assert_same(result: Trained, alone: Trained) -> None:
    differing = [name for name in alone.tensors if result.tensors.get(name) != alone.tensors[name]]
    assert not differing
    assert result == alone
