"""What is known before a ball: the scoreboard, careers, the table model; and splits that do not leak."""

from collections.abc import Iterable

import numpy as np
import pytest
import torch

from lockstep.errors import UserError
from lockstep.recipes.cricket.calibration import (
    NUM_BINS,
    CalibrationError,
    LossByOutcome,
    Reliability,
    draw_calibration,
)
from lockstep.recipes.cricket.careers import Balls, base_rate, fit_table, log_loss
from lockstep.recipes.cricket.innings_state import MAX_OVERS, MAX_WICKETS, NUM_CELLS, NUM_NUMBERS, describe_innings
from lockstep.recipes.cricket.league import InningsRecord, make_league
from lockstep.recipes.cricket.match import NUM_OUTCOMES, WICKET, Delivery, Innings, Match, outcome_of, split_matches
from lockstep.recipes.cricket.synthetic import synthetic_matches

MATCHES = synthetic_matches(16)


def ball(over: int = 0, runs: int = 0, *, wide: bool = False, no_ball: bool = False, out: str = "") -> Delivery:
    total = runs + wide + no_ball
    gone = (out,) if out else ()
    return Delivery(over, "a", "b", "z", runs, total, wide, no_ball, gone, outcome_of(runs, bool(gone)))


def innings(balls: Iterable[Delivery], target: int | None = None) -> Innings:
    return Innings("A", "Z", False, target, 20, 6, tuple(balls))


def with_other_outcomes(match: Match) -> Match:
    """Return the match with a six from every ball."""
    changed = [
        each._replace(
            deliveries=tuple(
                one._replace(runs=6, total=6, outcome=outcome_of(6, False), out=(), is_wide=False, is_no_ball=False)
                for one in each.deliveries
            )
        )
        for each in match.innings
    ]
    return match._replace(innings=tuple(changed))


def are_equal(one: list[InningsRecord], other: list[InningsRecord]) -> bool:
    return len(one) == len(other) and all(
        a.match == b.match and all(torch.equal(x, y) for x, y in zip(a[1:], b[1:], strict=True))
        for a, b in zip(one, other, strict=True)
    )


def test_a_ball_is_described_by_what_came_before_it_alone() -> None:
    played = MATCHES[0].innings[1]
    whole = describe_innings(played, 1, 6)
    assert whole.numbers.shape == (len(played.deliveries), NUM_NUMBERS)
    assert np.isfinite(whole.numbers).all()
    assert np.abs(whole.numbers).max() < 10
    for place in (0, 1, 17, 60):
        changed = list(played.deliveries)
        changed[place] = changed[place]._replace(runs=3, total=3, outcome=3, out=())
        other = describe_innings(played._replace(deliveries=tuple(changed)), 1, 6)
        differs = (whole.numbers != other.numbers).any(1)
        assert not differs[: place + 1].any()
        assert differs[place + 1]


def test_the_cell_is_stage_over_and_wickets_lost() -> None:
    balls = [ball(0), ball(0, out="a"), ball(0), ball(7), ball(99)]
    cells = describe_innings(innings(balls), 1, 6).cells
    found = [(cell // (MAX_WICKETS + 1) % MAX_OVERS, cell % (MAX_WICKETS + 1)) for cell in cells.tolist()]
    assert found == [(0, 0), (0, 0), (0, 1), (7, 1), (MAX_OVERS - 1, 1)]
    assert {cell // ((MAX_WICKETS + 1) * MAX_OVERS) for cell in cells.tolist()} == {1}


def test_a_free_hit_lasts_until_a_legal_ball() -> None:
    balls = [ball(no_ball=True), ball(wide=True), ball(), ball()]
    numbers = describe_innings(innings(balls), 0, 6).numbers
    without = describe_innings(innings([ball(wide=True), ball(wide=True), ball(), ball()]), 0, 6).numbers
    free_hit = 24  # the last of the score's numbers
    assert numbers[:, free_hit].tolist() == [0, 1, 1, 0]
    assert not without[:, free_hit].any()


def test_the_features_include_the_target_of_a_chase() -> None:
    balls = [ball(runs=4), ball(runs=1)]
    assert (
        (describe_innings(innings(balls, 5), 1, 6).numbers != describe_innings(innings(balls, 200), 1, 6).numbers)
        .any(1)
        .all()
    )


@pytest.mark.parametrize("rule", ["match", "date"])
def test_a_split_keeps_matches_whole_and_never_changes(rule: str) -> None:
    train, test = split_matches(MATCHES, rule, 0.25, "test")  # type: ignore[arg-type]
    names = [{match.name for match in part} for part in (train, test)]
    assert not names[0] & names[1]
    assert len(names[0] | names[1]) == len(MATCHES)
    assert 1 <= len(test) <= 12
    if rule == "date":
        assert max(match.date for match in train) < min(match.date for match in test)
    else:
        fewer = split_matches(MATCHES[::2], rule, 0.25, "test").test  # type: ignore[arg-type]
        assert {match.name for match in fewer} == names[1] & {match.name for match in MATCHES[::2]}


def test_matches_of_one_day_stay_together() -> None:
    same_day = [match._replace(date=f"2020-01-{1 + number // 8:02}") for number, match in enumerate(MATCHES)]
    train, test = split_matches(same_day, "date", 0.2, "test")
    assert not {match.date for match in train} & {match.date for match in test}


def test_too_few_matches_to_split_are_refused() -> None:
    with pytest.raises(UserError, match=r"data.split=date: 0 matches for training and 1 for the test"):
        split_matches(MATCHES[:1], "date", 0.2, "test")


@pytest.mark.parametrize("rule", ["match", "date"])
def test_nothing_of_a_test_match_reaches_training(rule: str) -> None:
    league = make_league(MATCHES, rule, 0.25, "test")  # type: ignore[arg-type]
    test_names = {record.match for record in league.test}
    assert not test_names & {record.match for record in league.train}
    changed = [with_other_outcomes(match) if match.name in test_names else match for match in MATCHES]
    other = make_league(changed, rule, 0.25, "test")  # type: ignore[arg-type]
    assert are_equal(league.train, other.train)
    assert np.array_equal(league.table.probabilities, other.table.probabilities)
    assert not are_equal(league.test, other.test)


def test_validation_matches_come_from_training_and_test_matches_are_not_looked_at() -> None:
    test_names = {record.match for record in make_league(MATCHES, "match", 0.25, "test").test}
    league = make_league(MATCHES, "match", 0.25, "validation")
    assert not test_names & {record.match for record in [*league.train, *league.test]}
    changed = [with_other_outcomes(match) if match.name in test_names else match for match in MATCHES]
    other = make_league(changed, "match", 0.25, "validation")
    assert are_equal(league.train, other.train)
    assert are_equal(league.test, other.test)


def test_careers_are_of_earlier_days_and_earlier_innings_only() -> None:
    league = make_league(MATCHES, "date", 0.25, "test")
    first, second = league.test[0], league.test[1]
    assert first.match == second.match
    place = next(number for number, match in enumerate(MATCHES) if match.name == first.match)
    # If the second innings and everything later changes, the figures of the first innings' players stay the same.
    changed = [*MATCHES[:place], *(with_other_outcomes(match) for match in MATCHES[place:])]
    kept = changed[place].innings[1:]
    changed[place] = changed[place]._replace(innings=(MATCHES[place].innings[0], *kept))
    other = make_league(changed, "date", 0.25, "test").test
    assert are_equal([first], [other[0]])
    assert torch.equal(second.figures, other[1].figures)
    assert torch.equal(second.setting, other[1].setting)
    assert first.figures.abs().sum() > 0
    # Matches of one day do not count for each other.
    same_day = [match._replace(date="2020-01-01") for match in MATCHES]
    assert not any(record.figures.any() for record in make_league(same_day, "match", 0.25, "test").train)


def test_a_batters_career_shows_in_the_figures() -> None:
    mixed = innings([ball(runs=0), ball(runs=6)._replace(batter="hitter", bowler="y")] * 30)
    league = make_league([match._replace(innings=(mixed,)) for match in MATCHES], "date", 0.2, "test")
    figures, players = league.test[0].figures, league.test[0].players
    six = 5
    assert figures[players[0, 1], six] > 0.5
    assert figures[players[0, 0], six] < -0.5


def test_unknown_players_share_one_identity() -> None:
    league = make_league(MATCHES, "date", 0.25, "test")
    assert all(record.identities.min() >= 1 for record in league.train)
    stranger = MATCHES[-1].innings[0].deliveries[0].batter
    renamed = (
        MATCHES[-1]
        .innings[0]
        ._replace(
            deliveries=tuple(
                each._replace(
                    batter="new" if each.batter == stranger else each.batter,
                    non_striker="new" if each.non_striker == stranger else each.non_striker,
                )
                for each in MATCHES[-1].innings[0].deliveries
            )
        )
    )
    matches = [*MATCHES[:-1], MATCHES[-1]._replace(innings=(renamed,))]
    record = make_league(matches, "date", 0.25, "test").test[-1]
    assert (record.identities == 0).sum() == 1


def test_the_table_is_smoothed_counts_and_better_than_the_base_rate_where_cells_differ() -> None:
    generator = np.random.default_rng(0)
    cells = np.repeat([0, 1], 4000)
    probabilities = np.array([[0.5, 0.3, 0.1, 0.02, 0.05, 0.02, 0.01], [0.2, 0.3, 0.1, 0.05, 0.15, 0.1, 0.1]])
    outcomes = np.array([generator.choice(NUM_OUTCOMES, p=probabilities[cell]) for cell in cells])
    balls = Balls(cells, outcomes)
    table = fit_table(balls, balls, balls)
    assert table.probabilities.shape == (NUM_CELLS, NUM_OUTCOMES)
    np.testing.assert_allclose(table.probabilities.sum(1), 1)
    np.testing.assert_allclose(table.probabilities[7], table.base)  # a cell that was never seen
    counts = np.bincount(outcomes[cells == 1], minlength=NUM_OUTCOMES)
    expected = (counts + table.smoothing * table.base) / (4000 + table.smoothing)
    np.testing.assert_allclose(table.probabilities[1], expected)
    base = np.tile(base_rate(balls), (NUM_CELLS, 1))
    assert log_loss(table.probabilities, balls) < log_loss(base, balls) - 0.05


def test_smoothing_is_chosen_to_fit_the_table_best() -> None:
    same, other = (
        Balls(np.zeros(1000, np.int64), np.repeat(np.arange(2), counts)) for counts in ([500] * 2, [900, 100])
    )
    apart = Balls(np.repeat([0, 1], 1000), np.concatenate([same.outcomes, other.outcomes]))
    assert fit_table(apart, apart, apart).smoothing == 1  # the cells differ, and there are many balls
    few = make_league(MATCHES[:12], "match", 0.2, "test").table
    assert few.smoothing >= 100  # a dozen matches say nearly nothing of single cells


def test_calibration_is_exact_for_what_is_known() -> None:
    probabilities = torch.full((10, NUM_OUTCOMES), 0.1)
    probabilities[:, 0] = 0.4
    outcomes = torch.tensor([0] * 4 + [1, 2, 3, 4, 5, 6])
    perfect = CalibrationError(probabilities, outcomes)
    assert perfect.result(perfect.value(torch.device("cpu"))) == pytest.approx(0, abs=1e-7)
    wrong = CalibrationError(probabilities, torch.zeros(10, dtype=torch.int64))
    assert wrong.result(wrong.value(torch.device("cpu"))) == pytest.approx((0.6 + 6 * 0.1) / NUM_OUTCOMES)
    cells = Reliability(probabilities, outcomes).value(torch.device("cpu"))
    assert cells.shape == (NUM_OUTCOMES, NUM_BINS, 3)
    assert cells[:, :, 0].sum(1).tolist() == [10] * NUM_OUTCOMES
    drawn = draw_calibration([("network", cells.tolist()), ("table", cells.tolist())])
    assert drawn.dtype == torch.uint8
    assert drawn.shape[2] == 3
    assert drawn.float().std() > 0


def test_losses_are_reported_by_outcome() -> None:
    part = LossByOutcome(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, WICKET]))
    found = part.result(part.value(torch.device("cpu")))
    assert (found[0], found[WICKET]) == (2, 5)
    assert np.isnan(found[1])


def test_synthetic_matches_never_change_and_are_marked() -> None:
    assert synthetic_matches(3) == MATCHES[:3]
    assert all("Synthetic" in match.venue and match.name.startswith("synthetic") for match in MATCHES)
    totals = [sum(each.total for each in match.innings[0].deliveries) for match in MATCHES]
    assert 90 < np.mean(totals) < 220
    assert all(sum(bool(each.out) for each in one.deliveries) <= 10 for match in MATCHES for one in match.innings)
