"""The Pareto front of a search's designs. (Reading them is tested with the run record.)"""

from lockstep.observe.evaluated_designs import pareto_designs


def test_the_front_of_two_objectives() -> None:
    points = [(1.0, 1.0), (2.0, 3.0), (3.0, 2.0), (2.0, 2.0), (4.0, 3.0), (0.5,)]
    assert pareto_designs(points, (False, True)) == [(1.0, 1.0), (2.0, 3.0)]
    assert pareto_designs(points, (True, True)) == [(4.0, 3.0)]
