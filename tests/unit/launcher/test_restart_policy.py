"""A budget of restarts that progress refills, and no third try of the same crash at the same step."""

from lockstep.launcher.restart_policy import RestartPolicy
from lockstep.supervision.failure_report import FailureVerdict


def crash(cause: str = "ValueError: planted") -> FailureVerdict:
    return FailureVerdict(3, [cause], cause, rank=1)


KILL = FailureVerdict(3, ["killed"], "killed by SIGKILL", rank=0, is_from_outside=True)


def test_there_are_no_restarts_by_default() -> None:
    decision = RestartPolicy(0).decide(KILL, step=5)
    assert not decision.is_restart
    assert decision.why == ""


def test_kills_at_one_step_use_the_budget_up() -> None:
    policy = RestartPolicy(2)
    assert [policy.decide(KILL, step=0).is_restart for _ in range(3)] == [True, True, False]
    assert policy.num_made == 2


def test_a_new_step_refills_the_budget_and_an_old_one_does_not() -> None:
    policy = RestartPolicy(1)
    assert all(policy.decide(KILL, step).is_restart for step in (1, 2, 3))
    assert policy.decide(KILL, step=3).why.startswith("no restart: 1 restart without a new step")


def test_the_same_crash_at_the_same_step_is_not_tried_a_third_time() -> None:
    policy = RestartPolicy(5)
    assert policy.decide(crash(), step=7).is_restart
    second = policy.decide(crash(), step=7)
    assert not second.is_restart
    assert second.why == "no restart: it failed after step 7 in the same way as before, so it would again"


def test_another_crash_or_the_same_at_another_step_is_tried_again() -> None:
    policy = RestartPolicy(5)
    assert policy.decide(crash(), step=7).is_restart
    assert policy.decide(crash("OSError: disk"), step=7).is_restart
    assert policy.decide(crash(), step=8).is_restart


def test_a_final_failure_is_not_tried_again() -> None:
    refused = FailureVerdict(2, ["data.path: no such file"], "data.path: no such file", rank=0, is_final=True)
    assert not RestartPolicy(5).decide(refused, step=0).is_restart


def test_it_is_stuck_if_a_restart_came_no_further() -> None:
    policy = RestartPolicy(5)
    policy.decide(KILL, step=4)
    assert not policy.is_stuck, "there was no restart yet"
    policy.decide(KILL, step=4)
    assert policy.is_stuck
    policy.decide(KILL, step=5)
    assert not policy.is_stuck


def test_process_ids_and_addresses_do_not_make_a_crash_another_one() -> None:
    policy = RestartPolicy(5)
    for first, second in (
        (
            "DataLoader worker (pid 43) is killed by signal: Killed",
            "DataLoader worker (pid 61) is killed by signal: Killed",
        ),
        ("DataLoader worker (pid(s) 4, 5) exited", "DataLoader worker (pid(s) 70, 712) exited"),
        ("KeyError: <A object at 0x7f01>", "KeyError: <A object at 0x7fa2>"),
    ):
        assert policy.decide(crash(first), step=7).is_restart
        assert not policy.decide(crash(second), step=7).is_restart
