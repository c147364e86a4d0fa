"""The fault plan: a function of its seed, which includes every kind of fault."""

from collections import Counter

from lockstep.chaos.fault_plan import PlannedFault, draw_fault_plan


def plan(seed: int, kills: int, **changed: bool | int) -> list[PlannedFault]:
    return draw_fault_plan(seed, kills, **{"processes": 3, "steps": 60, "with_data_workers": True, **changed})  # type: ignore[arg-type]


def test_the_plan_depends_on_the_seed_alone() -> None:
    assert plan(7, 50) == plan(7, 50)
    assert plan(7, 50) != plan(8, 50)


def test_there_are_as_many_kills_as_asked_for_and_faults_are_numbered() -> None:
    for kills in (1, 20, 300):
        drawn = plan(1, kills)
        assert sum(fault.is_kill for fault in drawn) == kills
        assert [fault.number for fault in drawn] == list(range(1, len(drawn) + 1))


def test_every_victim_act_moment_and_number_of_processes_occurs() -> None:
    drawn = plan(3, 300)
    assert set(Counter(fault.victim for fault in drawn)) == {
        "rank 0",
        "any rank",
        "launcher",
        "fork server",
        "data worker",
        "everything",
    }
    assert {fault.act for fault in drawn} == {"kill", "stop, then kill", "stop, then let go on"}
    assert {fault.moment for fault in drawn} == {"start", "step", "save", "evaluation"}
    assert {fault.processes for fault in drawn} == {1, 2, 3}


def test_data_workers_are_no_targets_where_there_are_none() -> None:
    assert "data worker" not in {fault.victim for fault in plan(3, 300, with_data_workers=False)}


def test_faults_are_spread_over_the_run() -> None:
    steps = [fault.after_steps for fault in plan(5, 99, steps=1000)]
    assert max(steps) <= 20
    assert 8 < sum(steps) / len(steps) < 12
