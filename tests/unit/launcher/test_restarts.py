"""A budget that progress refills, and an end to crashing at one step again and again."""

from lockstep.launcher.restarts import Restarts
from lockstep.supervision.failure import Verdict


def crash(cause: str = "ValueError: planted") -> Verdict:
    return Verdict(3, [cause], cause, rank=1)


KILL = Verdict(3, ["killed"], "killed by SIGKILL", rank=0, is_from_outside=True)


def test_none_are_made_unless_asked_for() -> None:
    decision = Restarts(0).decide(KILL, step=5)
    assert not decision.goes_on
    assert decision.why == ""


def test_kills_at_one_step_use_the_budget_up() -> None:
    restarts = Restarts(2)
    assert [restarts.decide(KILL, step=0).goes_on for _ in range(3)] == [True, True, False]
    assert restarts.num_made == 2


def test_a_new_step_fills_the_budget_again_and_an_old_one_does_not() -> None:
    restarts = Restarts(1)
    assert all(restarts.decide(KILL, step).goes_on for step in (1, 2, 3))
    assert restarts.decide(KILL, step=3).why.startswith("no restart: 1 restart without a step that is new")


def test_the_same_crash_at_the_same_step_is_not_tried_a_third_time() -> None:
    restarts = Restarts(5)
    assert restarts.decide(crash(), step=7).goes_on
    second = restarts.decide(crash(), step=7)
    assert not second.goes_on
    assert second.why == "no restart: it failed after step 7 in the same way as before, so it would again"


def test_another_crash_there_or_the_same_elsewhere_is() -> None:
    restarts = Restarts(5)
    assert restarts.decide(crash(), step=7).goes_on
    assert restarts.decide(crash("OSError: disk"), step=7).goes_on
    assert restarts.decide(crash(), step=8).goes_on


def test_what_would_be_the_same_again_is_not_tried() -> None:
    refused = Verdict(2, ["data.path: no such file"], "data.path: no such file", rank=0, is_final=True)
    assert not Restarts(5).decide(refused, step=0).goes_on


def test_it_is_stuck_when_a_restart_came_no_further() -> None:
    restarts = Restarts(5)
    restarts.decide(KILL, step=4)
    assert not restarts.is_stuck, "there was no restart yet"
    restarts.decide(KILL, step=4)
    assert restarts.is_stuck
    restarts.decide(KILL, step=5)
    assert not restarts.is_stuck


def test_the_same_crash_is_the_same_though_processes_and_objects_have_other_numbers() -> None:
    restarts = Restarts(5)
    for first, second in (
        (
            "DataLoader worker (pid 43) is killed by signal: Killed",
            "DataLoader worker (pid 61) is killed by signal: Killed",
        ),
        ("DataLoader worker (pid(s) 4, 5) exited", "DataLoader worker (pid(s) 70, 712) exited"),
        ("KeyError: <A object at 0x7f01>", "KeyError: <A object at 0x7fa2>"),
    ):
        assert restarts.decide(crash(first), step=7).goes_on
        assert not restarts.decide(crash(second), step=7).goes_on
