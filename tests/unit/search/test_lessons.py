"""What the network is taught."""

import pytest
import torch

from lockstep.search import lessons as module
from lockstep.search.archive import Archive
from lockstep.search.frame import Frame
from lockstep.search.lessons import Lessons, Memory, draw_lessons, lesson_terms, normal_ranks
from lockstep.search.network import GuidanceNetwork
from lockstep.world.randomness import stream
from tests.unit.search.guided import GENOME, costs_of, filled


def drawn(archive: Archive, count: int = 200) -> tuple[Frame, Memory, Lessons]:
    memory = Memory.of(archive, 50)
    frame = Frame.around(GENOME, memory.designs[: memory.num_good])
    return frame, memory, draw_lessons(frame, memory, count, stream(1, "lessons"))


def network() -> GuidanceNetwork:
    return GuidanceNetwork(3, 3, 1, members=2, width=8, depth=1, generator=stream(0, "weights"))


def test_ranks_become_normal_deviates_and_equals_share_theirs() -> None:
    costs = torch.tensor([[5.0, 1.0], [1e9, 1.0], [-3.0, 1.0], [5.0, 1.0]], dtype=torch.float64)
    first, second = normal_ranks(costs).unbind(1)
    assert first[0] == first[3] == 0.0 and first[1] > 0 > first[2]
    torch.testing.assert_close(first[1], -first[2])
    assert second.tolist() == [0.0] * 4
    many = normal_ranks(torch.arange(1000, dtype=torch.float64)[:, None])
    torch.testing.assert_close(many.std(), torch.tensor(1.0, dtype=torch.float64), atol=0.01, rtol=0.0)


def test_the_best_are_remembered_best_first_and_then_failures() -> None:
    archive = filled(100, failed=[3, 70])
    memory = Memory.of(archive, 20)
    costs = costs_of(memory.designs)[:20, 0]
    assert memory.num_good == 20 and torch.equal(costs, archive.costs[:, 0].sort().values[:20])
    assert torch.equal(memory.designs[20:], archive.designs[[3, 70]])


def test_designs_are_compared_in_bounded_numbers_with_the_same_lessons(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, at_once = drawn(filled(100))
    distances, counts = module._distances, []

    def counted(*tables: torch.Tensor) -> torch.Tensor:
        counts.append(tables[-1].numel() * len(GENOME))
        return distances(*tables)

    monkeypatch.setattr(module, "_distances", counted)
    monkeypatch.setattr(module, "_DIFFERENCES", 500)
    *_, in_parts = drawn(filled(100))
    assert all(map(torch.equal, at_once, in_parts))
    assert sum(counts) == 200 * module._PARTNERS * len(GENOME) and max(counts) <= 500


def test_a_lesson_leads_to_a_better_design_near_by() -> None:
    frame, memory, lessons = drawn(filled(100))
    better = (lessons.features[:, :3] + lessons.moves).double()
    ends = frame.designs(better, lessons.options.argmax(1, keepdim=True).double())
    starts = frame.designs(lessons.features[:, :3].double(), lessons.features[:, 3:].argmax(1, keepdim=True).double())
    has_better = lessons.gains > 0
    assert has_better.any() and (costs_of(ends) < costs_of(starts))[has_better].all()
    typical = (frame.numbers_of(memory.designs)[:, None] - frame.numbers_of(memory.designs)).norm(dim=2).median()
    assert lessons.moves[has_better].norm(dim=1).median() < 0.8 * typical


def test_from_the_best_no_move_counts() -> None:
    frame, memory, lessons = drawn(filled(100), count=2000)
    is_best = (lessons.features == frame.features(memory.designs[:1])).all(1)
    assert is_best.any() and (lessons.gains[is_best] == 0).all() and (lessons.gains[~is_best] > 0).any()


def test_a_longer_way_up_counts_more() -> None:
    _, memory, lessons = drawn(filled(100), count=2000)
    places = lessons.costs[:, 0]
    found = lessons.gains > 0
    assert lessons.gains[found & (places > 1)].mean() > lessons.gains[found & (places < -1)].mean()
    assert memory.num_good == 50


def test_there_are_as_many_lessons_as_asked_for_however_few_designs() -> None:
    _, _, lessons = drawn(filled(8), count=500)
    assert {len(part) for part in lessons} == {500}


def test_failures_teach_no_cost_but_that_they_fail() -> None:
    _, _, lessons = drawn(filled(100, failed=range(40)))
    assert 0 < lessons.failed.mean() < 1
    other = lessons._replace(costs=lessons.costs + 7.0 * lessons.failed[:, None])
    told = [lesson_terms(network(), each, [3], 1.0, 1.0) for each in (lessons, other)]
    assert torch.equal(told[0]["value"][0], told[1]["value"][0])
    mistaken = lesson_terms(network(), lessons._replace(failed=1.0 - lessons.failed), [3], 1.0, 1.0)
    assert mistaken["failure"][0] != told[0]["failure"][0]


def test_weights_are_the_losses() -> None:
    _, _, lessons = drawn(filled(100))
    plain = lesson_terms(network(), lessons, [3], 1.0, 1.0)
    weighted = lesson_terms(network(), lessons, [3], 2.0, 0.5)
    for name, factor in {"value": 2.0, "failure": 2.0, "policy": 0.5}.items():
        torch.testing.assert_close(weighted[name][0], factor * plain[name][0])


def test_the_policys_loss_is_the_moves_likelihood() -> None:
    made = network()
    lessons = drawn(filled(100), count=1)[2]._replace(gains=torch.tensor([2.0]))
    outlook = made(lessons.features)
    moves = torch.distributions.Normal(outlook.moves, outlook.spreads.exp()).log_prob(lessons.moves)
    options = torch.distributions.Categorical(logits=outlook.options).log_prob(lessons.options.argmax(1))
    constant = 3 * 0.5 * torch.log(torch.tensor(2 * torch.pi))
    expected = -2.0 * (moves.sum(2) + constant + options).sum() / 6
    torch.testing.assert_close(lesson_terms(made, lessons, [3], 1.0, 1.0)["policy"][0], expected)
