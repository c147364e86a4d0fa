"""Which rank called another collective than usual, by what the ranks that were not aborted have recorded."""

from lockstep.supervision.collective_mismatch import CollectiveMismatch, find_deviation, find_mismatch
from lockstep.supervision.flight_recorder import Collective
from lockstep.supervision.heartbeat import Phase
from lockstep.supervision.rank_probe import RankObservation
from lockstep.supervision.stack_dumps import StackFrame
from lockstep.supervision.wait_analysis import PeerWait
from tests.unit.supervision.observations import seen


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


def test_a_rank_that_calls_a_larger_one_for_the_first_time_has_skipped_nothing() -> None:
    """The aborted rank may have skipped it."""
    assert find_deviation({0: recorded(2, 9, 2, 300)}) == ((), "rank 0 called all_reduce of [[300]]")


def test_a_rank_may_skip_several() -> None:
    found = find_deviation({0: recorded(2, 3, 9, 2, 3, 9, 9)})
    assert found == ((0,), "skipped the all_reduce of [[2]] and called all_reduce of [[9]] instead")


def test_a_rank_that_skips_what_is_called_once_is_found_by_the_number_of_ranks() -> None:
    """The aborted rank waited in a smaller collective than the rank whose data it received."""
    skipped, usual = recorded(2, 9, 2, 9), recorded(2, 9, 2, 5)
    expected = "called all_reduce of [[9]] where most ranks call all_reduce of [[5]]"
    assert find_deviation({1: usual, 2: skipped}) == ((2,), expected)
    assert find_deviation({1: skipped, 2: skipped}) == (
        (),
        "rank 1 called all_reduce of [[9]], rank 2 called all_reduce of [[9]]",
    )
    computing = recorded(2, 9, 2)
    assert find_deviation({1: computing, 2: skipped}).ranks == (), "it has not begun the collective"


def test_an_abort_with_another_backend_is_not_gloos() -> None:
    skipped = [each._replace(backend="nccl") for each in recorded(2, 9, 2, 9, 9)]
    assert find_deviation({1: skipped}).ranks == ()


def test_without_a_record_nothing_is_known() -> None:
    assert find_deviation({}).ranks == ()
    assert find_deviation({0: [], 1: recorded(2)}).ranks == ()


def seen_in(*last: Collective) -> list[RankObservation]:
    """Ranks that wait in these collectives, after two equal steps."""
    step = [("scatter", "[[2, 9]]"), ("all_reduce", "[[9]]"), ("barrier", "[]")]
    before = tuple(
        Collective(number, "0", name, sizes, True, "gloo") for number, (name, sizes) in enumerate(2 * step, 1)
    )
    other = tuple(each._replace(sizes="[]") if each.name == "scatter" else each for each in before)
    return [seen(rank, collectives=(*(other if rank else before), each)) for rank, each in enumerate(last)]


def mismatch(*last: Collective) -> CollectiveMismatch:
    """What is found if the ranks wait in different places of the script."""
    waits = {rank: PeerWait(each.name, StackFrame("train.py", rank, "main")) for rank, each in enumerate(last)}
    return find_mismatch(seen_in(*last), waits)


USUAL = Collective(7, "0", "scatter", "[]", False, "gloo")
FOLLOWING = Collective(7, "0", "all_reduce", "[[9]]", False, "gloo")
ONCE = Collective(7, "0", "all_reduce", "[[5]]", False, "gloo")


def test_a_rank_has_skipped_a_collective_if_it_is_in_the_one_that_follows() -> None:
    assert mismatch(USUAL, FOLLOWING) == ((1,), "rank 1 skipped the scatter that the other ranks call")
    assert mismatch(ONCE, USUAL, ONCE) == ((1,), "rank 1 skipped the all_reduce of [[5]] that the other ranks call")


def test_of_two_ranks_either_may_be_wrong_about_a_collective_that_is_called_once() -> None:
    found = mismatch(ONCE, USUAL)
    assert found.words == "rank 0 called all_reduce of [[5]] where the other ranks call scatter"


def test_a_shape_that_differs_is_no_difference() -> None:
    flat, square = (ONCE._replace(sizes=sizes, is_done=True) for sizes in ("[[16]]", "[[4, 4]]"))
    assert mismatch(flat, square).words == ""


def test_a_rank_that_waits_in_another_group_has_skipped_nothing_in_this_one() -> None:
    barrier = Collective(7, "0", "barrier", "[]", False, "gloo")
    found = mismatch(ONCE._replace(group="1", number=1), barrier, barrier)
    assert found == ((0,), "rank 0 called all_reduce of [[5]], which the other ranks do not")


def test_of_two_ranks_in_one_step_neither_is_said_to_be_wrong() -> None:
    """One that waits for gradients has come further in the step, but the other one may call too much."""
    barrier, gradients = seen(0), seen(1, phase=Phase.EXCHANGING)
    waits = {0: PeerWait("barrier", None), 1: PeerWait("the gradient exchange", None)}
    assert find_mismatch([barrier, gradients], waits).ranks == ()
    ahead = gradients._replace(heartbeat=gradients.heartbeat._replace(step=6))
    assert find_mismatch([barrier, ahead], waits).ranks == (1,)
