"""The plan of the attacks: a function of its seed, with something of everything in it."""

from collections import Counter

from lockstep.observe.chaos.plan import Attack, draw_plan


def plan(seed: int, kills: int, **changed: bool | int) -> list[Attack]:
    return draw_plan(seed, kills, **{"processes": 3, "steps": 60, "with_data_workers": True, **changed})  # type: ignore[arg-type]


def test_the_same_seed_draws_the_same_plan_and_another_another() -> None:
    assert plan(7, 50) == plan(7, 50)
    assert plan(7, 50) != plan(8, 50)


def test_there_are_as_many_kills_as_were_asked_for_and_they_are_numbered() -> None:
    for kills in (1, 20, 300):
        drawn = plan(1, kills)
        assert sum(attack.is_kill for attack in drawn) == kills
        assert [attack.number for attack in drawn] == list(range(1, len(drawn) + 1))


def test_every_victim_act_moment_and_number_of_processes_gets_its_turn() -> None:
    drawn = plan(3, 300)
    assert set(Counter(attack.victim for attack in drawn)) == {
        "rank 0",
        "any rank",
        "launcher",
        "nursery",
        "data worker",
        "everything",
    }
    assert {attack.act for attack in drawn} == {"kill", "stop, then kill", "stop, then let go on"}
    assert {attack.moment for attack in drawn} == {"start", "step", "save", "evaluation"}
    assert {attack.processes for attack in drawn} == {1, 2, 3}


def test_data_workers_are_no_victims_where_there_are_none() -> None:
    assert "data worker" not in {attack.victim for attack in plan(3, 300, with_data_workers=False)}


def test_the_attacks_are_spread_over_the_run() -> None:
    steps = [attack.after_steps for attack in plan(5, 99, steps=1000)]
    assert max(steps) <= 20
    assert 8 < sum(steps) / len(steps) < 12
