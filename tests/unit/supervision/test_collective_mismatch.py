"""Which rank called another collective than usual, by what the ranks that were not aborted have recorded."""

from lockstep.supervision.collective_mismatch import find_deviation
from lockstep.supervision.flight_recorder import Collective


def recorded(*sizes: int) -> list[Collective]:
    """All-reduces of these sizes; the rank waits in the last."""
    last = len(sizes)
    return [
        Collective(number, "0", "all_reduce", f"[[{size}]]", number < last, "gloo", float(number))
        for number, size in enumerate(sizes, 1)
    ]


def test_a_rank_that_skipped_one_is_found_by_what_usually_follows() -> None:
    found = find_deviation({1: recorded(2, 9, 2, 9, 9)})
    assert found == ((1,), "skipped the all_reduce of [[2]] and called all_reduce of [[9]] instead")
    assert find_deviation({1: recorded(2, 9, 2, 9, 2)}).ranks == ()


def test_a_collective_that_is_new_but_small_aborts_nobody() -> None:
    """The aborted rank has ended for another reason, or is itself the one that skipped something."""
    barrier = Collective(5, "0", "barrier", "[]", False, "gloo", 5.0)
    assert find_deviation({1: [*recorded(2, 2, 2, 2)[:3], recorded(2, 2, 2, 2, 2)[3], barrier]}).ranks == ()


def test_the_longest_repetition_says_what_follows() -> None:
    """In steps of 2, 2, 9: after the first 2 comes another."""
    assert find_deviation({1: recorded(2, 2, 9, 2, 2, 9, 2, 2)}).ranks == ()
    assert find_deviation({1: recorded(2, 2, 9, 2, 2, 9, 2, 9)}).ranks == (1,)


def test_a_rank_that_has_lost_contact_waited_in_its_last_collective() -> None:
    lost = [each._replace(is_done=True) for each in recorded(2, 9, 2, 9, 9)]
    assert find_deviation({0: lost}).ranks == (0,)


def test_several_ranks_that_agree_do_not_deviate() -> None:
    skipped, usual = recorded(2, 9, 2, 9, 9), recorded(2, 9, 2, 9, 2)
    assert find_deviation({0: skipped, 1: usual}).ranks == (0,)
    assert find_deviation({0: skipped, 1: skipped}).ranks == ()


def test_an_abort_with_another_backend_is_not_gloos() -> None:
    skipped = [each._replace(backend="nccl") for each in recorded(2, 9, 2, 9, 9)]
    assert find_deviation({1: skipped}).ranks == ()


def test_without_a_record_nothing_is_known() -> None:
    assert find_deviation({}).ranks == ()
    assert find_deviation({0: [], 1: recorded(2)}).ranks == ()
