import math
from typing import Any

import pytest
import torch

from lockstep.errors import UserError
from lockstep.search.genome import ChoiceGene, FloatGene, Gene, Genome, IntegerGene

GENOME = Genome(
    [
        FloatGene("span", 1.2, 1.8, group="plan", unit="m"),
        IntegerGene("elements", -1, 3, group="plan"),
        ChoiceGene("section", ("naca", "gurney", "flat"), group="profile"),
        FloatGene("fixed", 2.0, 2.0),
        FloatGene("gap", -1.0, 1.0),
    ]
)
DESIGN = {"span": 1.5, "elements": 2, "section": "gurney", "fixed": 2.0, "gap": 0.0}


def sampled(count: int = 500) -> torch.Tensor:
    return GENOME.sample(count, torch.Generator().manual_seed(1))


def test_a_design_is_written_and_read_back() -> None:
    row = GENOME.row(DESIGN)
    assert row.tolist() == [1.5, 2.0, 1.0, 2.0, 0.0]
    design = GENOME.design(row)
    assert design == DESIGN
    assert type(design["elements"]) is int


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"span": 1.9}, "gene span: expected a number from 1.2 to 1.8 m, got 1.9"),
        ({"span": "long"}, "gene span: expected a number from 1.2 to 1.8 m, got 'long'"),
        ({"span": math.nan}, "gene span: expected a number from 1.2 to 1.8 m, got nan"),
        ({"elements": 1.5}, "gene elements: expected a whole number from -1 to 3, got 1.5"),
        ({"elements": True}, "gene elements: expected a whole number from -1 to 3, got True"),
        ({"section": "round"}, "gene section: expected one of naca, gurney, flat, got 'round'"),
        ({"spam": 1}, "the genome has no gene spam; did you mean span?"),
    ],
)
def test_an_impossible_value_of_a_gene_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        GENOME.row(DESIGN | change)
    assert str(caught.value) == message


def test_a_missing_gene_is_named() -> None:
    with pytest.raises(UserError, match="the design has no gap: give every gene a value"):
        GENOME.row({name: value for name, value in DESIGN.items() if name != "gap"})


@pytest.mark.parametrize(
    ("gene", "arguments"),
    [
        (FloatGene, (1.0, 0.0)),
        (FloatGene, (0.0, math.inf)),
        (FloatGene, (math.nan, 1.0)),
        (FloatGene, (-1e308, 1e308)),  # farther apart than a number can be
        (FloatGene, ("0", 1.0)),
        (FloatGene, (False, True)),
        (IntegerGene, (0.5, 2)),
        (IntegerGene, (0, 2**60)),
        (ChoiceGene, ((),)),
        (ChoiceGene, (("a", "a"),)),
        (ChoiceGene, ("abc",)),  # not three options
        (ChoiceGene, ((["a"], ["b"]),)),
    ],
)
def test_an_invalid_gene_is_refused(gene: type[Gene], arguments: tuple[object, ...]) -> None:
    with pytest.raises(UserError, match="gene bad: expected"):
        gene("bad", *arguments)  # type: ignore[arg-type]


def test_names_are_required_and_unique() -> None:
    with pytest.raises(UserError, match="genes: expected one or more with unique names, got a more than once"):
        Genome([FloatGene("a", 0.0, 1.0), IntegerGene("a", 0, 1)])
    with pytest.raises(UserError, match="genes: expected one or more with unique names, got none"):
        Genome([])


def test_repair_clips_to_bounds_and_rounds_whole_numbers() -> None:
    row = torch.tensor([[9.0, 1.6, -4.0, 7.0, -0.0]], dtype=torch.float64)
    repaired = GENOME.repair(row)
    assert repaired.tolist() == [[1.8, 2.0, 0.0, 2.0, 0.0]]
    assert not torch.signbit(repaired).any()  # −0 would be another key
    assert torch.equal(GENOME.repair(sampled()), sampled())


def test_a_sample_is_uniform_over_the_values_of_each_gene() -> None:
    sample = sampled(3000)
    for column, values in ((1, [-1, 0, 1, 2, 3]), (2, [0, 1, 2])):
        counts = [int((sample[:, column] == value).sum()) for value in values]
        assert sum(counts) == 3000 and max(counts) < 1.2 * min(counts)
    assert sample[:, 0].mean().item() == pytest.approx(1.5, abs=0.02)
    assert GENOME.spread(torch.ones(1, 5).double()).tolist() == [[1.8, 3.0, 2.0, 2.0, 1.0]]
    assert GENOME.spread(torch.zeros(1, 5).double()).tolist() == [[1.2, -1.0, 0.0, 2.0, -1.0]]


def test_designs_map_to_the_unit_cube_and_back() -> None:
    unit = GENOME.to_unit(sampled())
    assert unit.min() >= 0 and unit.max() <= 1 and (unit[:, 3] == 0).all()
    torch.testing.assert_close(GENOME.from_unit(unit), sampled())


def test_keys_differ_exactly_if_repaired_designs_do() -> None:
    row = GENOME.row(DESIGN)
    same = row + torch.tensor([0.0, 0.3, -0.2, 5.0, -0.0])
    other = row + torch.tensor([1e-15, 0.0, 0.0, 0.0, 0.0])
    keys = GENOME.keys(torch.stack([row, same, other]))
    assert keys[0] == keys[1] != keys[2]
    assert len(set(GENOME.keys(sampled()))) == 500


def test_a_group_travels_together_and_a_gene_without_one_alone() -> None:
    groups = {"a": "", "b": "g", "c": "", "d": "h", "e": "g"}
    genome = Genome([FloatGene(name, 0.0, 1.0, group=group) for name, group in groups.items()])
    assert genome.linkage_group_of_gene.tolist() == [0, 1, 2, 3, 1]
    assert genome.num_linkage_groups == 4


@pytest.mark.parametrize("option", [print, None, (1, 2), [1]])
def test_options_that_json_cannot_hold_are_refused(option: Any) -> None:
    with pytest.raises(UserError, match="gene kind: expected a tuple of strings, numbers or booleans, got"):
        ChoiceGene("kind", ("a", option))
