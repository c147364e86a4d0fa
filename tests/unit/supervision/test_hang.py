"""What is said about a hang, from observations as real ones look."""

import time

import torch

from lockstep.launcher import store
from lockstep.supervision.collectives import Collective
from lockstep.supervision.examination import Child, Observation
from lockstep.supervision.failure import Scene
from lockstep.supervision.hang import Hang, explain_hang
from lockstep.supervision.process import ProcessState
from lockstep.supervision.pulse import DataWorker, Phase, Reading
from lockstep.supervision.stacks import Frame
from lockstep.supervision.standing import judge, meeting

TORCH = torch.__file__.removesuffix("/__init__.py")
C10D = f"{TORCH}/distributed/distributed_c10d.py"


def seen(rank: int, *frames: Frame, phase: Phase = Phase.COMPUTING, state: str = "S", **more: object) -> Observation:
    reading = Reading(100 + rank, 1, 5, phase, 10.0, None, False, False, {}, [])
    observed = Observation(
        rank, None, reading, 52.0, ProcessState(100 + rank, "python", state, 0.0, 0, 0), frames=frames
    )
    return observed._replace(**more)


def calls(name: str, line: int) -> tuple[Frame, ...]:
    """The stack of a rank in a collective."""
    wrapper = Frame(f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper")
    return Frame(C10D, 3001, name), wrapper, Frame("train.py", line, "main")


def recorded(*names: str) -> tuple[Collective, ...]:
    return tuple(Collective(number, "0", name, "[[3]]", True) for number, name in enumerate(names, 1))


def explained(ranks: list[Observation], culprits: list[Observation], scene: Scene) -> Hang:
    judged = [judge(each, each, 42.0, world_size=scene.world_size) for each in ranks]
    return explain_hang(judged, [each.rank for each in culprits], scene)


def told(hang: Hang) -> str:
    (message,) = hang.verdict.messages
    return message


def test_the_culprit_comes_first_then_who_waits_for_it() -> None:
    culprit = seen(1, Frame("/usr/lib/x.py", 3, "recv"), Frame("train.py", 7, "fetch"))
    others = [seen(0, *calls("all_reduce", 9)), seen(2, *calls("all_reduce", 9)), seen(3, phase=Phase.EXCHANGING)]
    hang = explained([*others, culprit], [culprit], Scene(4, "host"))
    assert told(hang).startswith("rank 1 of 4 on host hangs in step 6 (forward and backward pass) for 42 s: it is at ")
    assert "ranks 0, 2 wait for it in all_reduce at train.py:9; rank 3 waits for it in the gradient exch" in told(hang)
    assert (hang.verdict.exit_code, hang.verdict.rank, hang.verdict.victims) == (5, 1, (0, 2, 3))


def test_what_is_being_imported_is_no_collective() -> None:
    assert meeting(seen(0, Frame(C10D, 1, "<module>"))) is None
    assert meeting(seen(0, Frame(C10D, 1, "barrier"))) is not None
    assert meeting(seen(0, Frame(store.__file__, 1, "await_keys"))) is not None


def test_a_backward_pass_waits_only_if_it_computes_nothing() -> None:
    observed = seen(0, Frame(f"{TORCH}/autograd/graph.py", 1, "_engine_run_backward"), Frame("train.py", 3, "main"))
    assert meeting(observed) is not None
    assert meeting(observed, is_busy=True) is None


def test_a_stopped_rank_waits_for_nobody() -> None:
    assert meeting(seen(0, phase=Phase.EXCHANGING)) is not None
    assert meeting(seen(0, phase=Phase.EXCHANGING, state="T")) is None


def test_the_data_worker_that_has_read_for_the_longest_is_named() -> None:
    def worker(number: int, sample: int | None, since: float) -> Child:
        state = ProcessState(200 + number, "python", "S", 0.0, number, 0)
        frames = (Frame("data.py", 30 + number, "__getitem__"),)
        return Child(200 + number, state, "", frames, "", DataWorker(number, 200 + number, sample, since))

    culprit = seen(0, phase=Phase.DATA, children=(worker(0, None, 1.0), worker(1, 8, 4.0), worker(2, 9, 3.0)))
    hang = explained([culprit], [culprit], Scene(1))
    assert "data worker 2 (pid 202), which does not get any further, reading sample 9, at data.py:32" in told(hang)
    assert (hang.facts["worker"], hang.facts["sample"], hang.facts["line"]) == (2, 9, 32)


def test_the_recorder_tells_who_has_left_the_common_order() -> None:
    """Two ranks, each in a collective of its own: which of them is wrong can only be told from what they did before."""
    common = ("all_reduce", "barrier") * 3
    at_barrier = seen(0, *calls("barrier", 9), collectives=recorded(*common, "barrier"))
    at_reduce = seen(1, *calls("all_reduce", 8), collectives=recorded(*common, "all_reduce"))
    hang = explained([at_barrier, at_reduce], [], Scene(2))
    assert "rank 0 has skipped the all_reduce of [[3]] that the other ranks make" in told(hang)
    assert (hang.verdict.rank, hang.facts["line"]) == (0, 9)
    at_gather = seen(1, *calls("gather", 8), collectives=recorded(*common, "gather"))
    at_reduce = at_reduce._replace(rank=0)
    assert explained([at_reduce, at_gather], [], Scene(2)).verdict.rank == 1


def test_a_rank_that_never_came_to_a_collective_has_skipped_it() -> None:
    waits = seen(0, *calls("all_reduce", 8), collectives=recorded(*["all_reduce"] * 4))
    ahead = seen(1, Frame("train.py", 11, "main"), phase=Phase.EXCHANGING, collectives=recorded(*["all_reduce"] * 3))
    hang = explained([waits, ahead], [], Scene(2))
    assert "rank 1 has skipped the all_reduce" in told(hang)
    assert hang.verdict.rank == 1


def test_without_a_recorder_the_most_ranks_are_right() -> None:
    ranks = [seen(0, *calls("barrier", 9)), seen(1, *calls("all_reduce", 8)), seen(2, *calls("barrier", 9))]
    hang = explained(ranks, [], Scene(3))
    assert "It seems that rank 1 has left the common order" in told(hang)
    assert hang.verdict.rank == 1


def test_nobody_is_blamed_where_all_are_at_the_same_place() -> None:
    hang = explained([seen(0, *calls("barrier", 9)), seen(1, *calls("barrier", 9))], [], Scene(2))
    assert "all 2 ranks wait in the same collective" in told(hang)
    assert hang.verdict.rank is None


def test_ranks_of_this_machine_wait_for_another() -> None:
    hang = explained([seen(0, *calls("barrier", 9))], [], Scene(2, "host"))
    assert "wait for a rank on another machine" in told(hang)
    assert hang.verdict.rank is None


def test_a_host_that_waits_for_a_late_gpu_waits_for_others() -> None:
    late = Collective(4, "0", "all_reduce", "[[3]]", False, "nccl", time.time() - 60)
    spinning = seen(0, Frame("train.py", 12, "main"), collectives=(late,))
    assert meeting(spinning, is_busy=True) == ("all_reduce on the GPU", Frame("train.py", 12, "main"))
    assert meeting(spinning, is_busy=True, has_moved=True) is None
    script = seen(0, Frame("train.py", 12, "<module>"), collectives=(late,))
    assert meeting(script, is_busy=True) == ("all_reduce on the GPU", Frame("train.py", 12, "<module>"))
    assert meeting(spinning) is None, "it sleeps at a line of its own"
    done = seen(0, Frame("train.py", 12, "main"), collectives=(late._replace(is_done=True),))
    assert meeting(done, is_busy=True) is None


def test_one_rank_alone_waits_for_nobody() -> None:
    alone = seen(0, phase=Phase.EXCHANGING)
    assert judge(alone, alone, 1.0, world_size=1).meeting is None
    assert judge(alone, alone, 1.0, world_size=2).meeting is not None
