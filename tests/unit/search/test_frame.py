"""How the network sees designs."""

import torch

from lockstep.search.frame import Frame
from lockstep.search.genome import ChoiceGene, FloatGene, Genome
from lockstep.world.randomness import stream
from tests.unit.search.guided import GENOME

DESIGNS = GENOME.sample(200, stream(3, "designs"))


def test_numbers_are_seen_from_the_middle_and_in_deviations() -> None:
    numbers = Frame.around(GENOME, DESIGNS).numbers_of(DESIGNS)
    torch.testing.assert_close(numbers.mean(0), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(numbers.std(0, correction=0), torch.ones(3, dtype=torch.float64))


def test_a_choice_is_a_column_an_option() -> None:
    frame = Frame.around(GENOME, DESIGNS)
    rows = torch.tensor([[0.0, 2.0, 45.0, 3.0], [0.0, 0.0, 45.0, 3.0]], dtype=torch.float64)
    assert frame.features(rows)[:, 3:].tolist() == [[0, 0, 1], [1, 0, 0]]


def test_designs_come_back() -> None:
    frame = Frame.around(GENOME, DESIGNS)
    back = frame.designs(frame.numbers_of(DESIGNS), DESIGNS[:, [1]])
    torch.testing.assert_close(back, DESIGNS)


def test_what_is_beyond_a_bound_is_repaired() -> None:
    frame = Frame.around(GENOME, DESIGNS)
    far = frame.designs(torch.full((1, 3), 99.0, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64))
    assert far.tolist() == [[6.0, 1.0, 90.0, 9.0]]


def test_where_all_are_alike_a_whole_number_still_moves() -> None:
    alike = DESIGNS[:1].expand(9, -1)
    frame = Frame.around(GENOME, alike)
    moved = frame.designs(frame.numbers_of(alike[:1]) - 2.0, alike[:1, [1]])
    assert float(moved[0, 3]) == float(alike[0, 3]) - 1
    torch.testing.assert_close(moved[0, 0], alike[0, 0], atol=1e-4, rtol=0.0)


def test_what_lies_far_out_is_seen_at_the_edge() -> None:
    frame = Frame.around(GENOME, DESIGNS[:1].expand(9, -1))
    assert frame.features(DESIGNS)[:, :3].abs().max() == 8.0


def test_a_genome_of_choices_alone() -> None:
    genome = Genome([ChoiceGene("a", (1, 2)), ChoiceGene("b", (1, 2, 3))])
    designs = torch.tensor([[1.0, 2.0], [0.0, 0.0]], dtype=torch.float64)
    frame = Frame.around(genome, designs)
    assert frame.features(designs).tolist() == [[0, 1, 0, 0, 1], [1, 0, 1, 0, 0]]
    assert torch.equal(frame.designs(frame.numbers_of(designs), designs), designs)


def test_a_gene_that_is_fixed_stays() -> None:
    genome = Genome([FloatGene("a", 2.0, 2.0), FloatGene("b", 0.0, 1.0)])
    designs = genome.sample(5, stream(0, "designs"))
    frame = Frame.around(genome, designs)
    assert frame.features(designs).isfinite().all()
    assert (frame.designs(frame.numbers_of(designs) + 1, designs[:, :0])[:, 0] == 2.0).all()


def test_the_state_makes_it_again() -> None:
    frame = Frame.around(GENOME, DESIGNS)
    again = Frame.from_state(GENOME, frame.state_dict())
    assert torch.equal(again.features(DESIGNS), frame.features(DESIGNS))
