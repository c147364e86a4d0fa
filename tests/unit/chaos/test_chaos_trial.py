"""The verdict on a run with injected faults."""

from lockstep.chaos.chaos_checks import ChaosCheck
from lockstep.chaos.chaos_trial import ChaosVerdict
from lockstep.chaos.fault_injector import InjectedFault, InjectionStats


def test_too_few_kills_fail_but_are_not_called_a_loss() -> None:
    kill = InjectedFault(0.0, 1, 1, 1, 2, "launcher", 7, "kill", "step", None, None, is_saving=False, is_hit=True)
    good, bad = (ChaosCheck("the end"),), (ChaosCheck("the end", ("is another",)),)

    def verdict(kills: int, checks: tuple[ChaosCheck, ...]) -> tuple[int, str]:
        found = ChaosVerdict(kills, InjectionStats([kill]), (checks,), "abc")
        return found.exit_code, found.lines()[-1]

    assert verdict(1, good) == (0, "nothing was lost: digest abc")
    assert verdict(1, bad) == (3, "something was lost")
    code, text = verdict(2, good)
    assert code == 3
    assert text.startswith("nothing was lost, but only 1 of 2 kills were possible: ")
