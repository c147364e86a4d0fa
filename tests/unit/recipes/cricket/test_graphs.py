"""Graphs and network: no ball sees its own outcome or a later one; losses are counted by ball."""

import pytest
import torch

from lockstep.config.train_schema import Config
from lockstep.errors import ConfigError
from lockstep.recipes.cricket import CricketConfig
from lockstep.recipes.cricket.cricket_network import CricketEnsemble, CricketNet, Sizes
from lockstep.recipes.cricket.graphs import InningsGraphs, collate_graphs, innings_graph, recent_pairs
from lockstep.recipes.cricket.league import make_league
from lockstep.recipes.cricket.match import NUM_OUTCOMES
from lockstep.recipes.cricket.recipe import CricketRecipe
from lockstep.recipes.cricket.synthetic import synthetic_matches
from lockstep.recipes.registry import load_recipe
from lockstep.train.optim.optimizer_factory import build_optimizer

MATCHES = synthetic_matches(8)
LEAGUE = make_league(MATCHES, "date", 0.25, "test")
MEMORY = 5


def network(dropout: float = 0.0, identity_dropout: float = 0.0) -> CricketNet:
    """Return a network in which every weight matters; at its start it only repeats the table."""
    torch.manual_seed(0)
    log_table = torch.from_numpy(LEAGUE.table.probabilities).log().float()
    net = CricketNet(log_table, Sizes(LEAGUE.num_players, MEMORY, 16, 4, 2, 2), dropout, identity_dropout)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0, 0.3)
    return net.eval()


def test_each_ball_is_paired_with_those_just_before_it() -> None:
    earlier, later = recent_pairs(5, 2)
    assert list(zip(later.tolist(), earlier.tolist(), strict=True)) == [
        (1, 0),
        (2, 1),
        (2, 0),
        (3, 2),
        (3, 1),
        (4, 3),
        (4, 2),
    ]
    assert [len(each) for each in recent_pairs(1, 3)] == [0, 0]


@pytest.mark.parametrize("place", [0, 1, 30, 90])
def test_predictions_do_not_change_by_one_bit_when_the_future_does(place: int) -> None:
    """Every outcome from ball `place` on changes; the predictions up to and including that ball stay the same."""
    match = MATCHES[-1]
    balls = list(match.innings[0].deliveries)
    for number in range(place, len(balls)):
        runs = 1 if balls[number].runs == 4 else 4
        balls[number] = balls[number]._replace(
            runs=runs, total=runs, outcome=runs, out=(), is_wide=False, is_no_ball=False
        )
    changed = match._replace(innings=(match.innings[0]._replace(deliveries=tuple(balls)), *match.innings[1:]))
    league = make_league([*MATCHES[:-1], changed], "date", 0.25, "test")
    net = network()
    before, after = (
        net(collate_graphs([innings_graph(record, MEMORY) for record in each.test if record.match == match.name]))
        for each in (LEAGUE, league)
    )
    differs = (before != after).any(1)[: len(balls)]
    assert not differs[: place + 1].any()
    assert differs[place + 1 :].all()


def test_earlier_outcomes_arrive_only_along_the_edges() -> None:
    record = LEAGUE.test[0]
    net = network()
    results = record.results.clone()
    results[20] = (results[20] + 1) % NUM_OUTCOMES
    before, after = (
        net(collate_graphs([innings_graph(each, MEMORY)])) for each in (record, record._replace(results=results))
    )
    differs = (before != after).any(1).nonzero().flatten().tolist()
    assert differs == list(range(21, 21 + 2 * MEMORY))  # two blocks pass it on twice


def test_innings_in_one_batch_do_not_affect_each_other() -> None:
    net = network()
    graphs = [innings_graph(record, MEMORY) for record in LEAGUE.test[:3]]
    apart = torch.cat([net(collate_graphs([each])) for each in graphs])
    torch.testing.assert_close(net(collate_graphs(graphs)), apart, atol=1e-4, rtol=1e-4)


def test_batter_bowler_partner_career_and_setting_all_count() -> None:
    record = LEAGUE.test[0]
    net = network()
    before = net(collate_graphs([innings_graph(record, MEMORY)]))
    for role in range(3):
        players = record.players.clone()
        players[role, 10] = (players[role, 10] + 5) % len(record.identities)
        assert (net(collate_graphs([innings_graph(record._replace(players=players), MEMORY)]))[10] != before[10]).any()
    for name in ("identities", "figures", "setting", "overs"):
        other = getattr(record, name) * 0 + 1
        assert (net(collate_graphs([innings_graph(record._replace(**{name: other}), MEMORY)])) != before).any()


def test_it_begins_as_the_table_model() -> None:
    recipe = CricketRecipe(config("data.matches=8"))
    net = recipe.model(recipe._config)
    batch = collate_graphs([innings_graph(record, 8) for record in recipe.league.test])
    table = torch.from_numpy(recipe.league.table.probabilities).log().float()
    torch.testing.assert_close(net.eval()(batch), table[batch["ball"].cell])
    parts = recipe.metrics(net, batch)
    torch.testing.assert_close(parts["log_loss"][0], parts["log_loss_table"][0])  # type: ignore[index]


def test_identities_are_left_out_in_training_only() -> None:
    net = network(identity_dropout=0.5)
    batch = collate_graphs([innings_graph(LEAGUE.test[0], MEMORY)])
    assert torch.equal(net(batch), net(batch))
    net.train()
    assert not torch.equal(net(batch), net(batch))


def config(*overrides: str) -> CricketConfig:
    loaded: Config = load_recipe("cricket", ["data.picture=no", *overrides])[1]  # type: ignore[assignment]
    assert isinstance(loaded, CricketConfig)
    return loaded


def test_losses_are_sums_over_balls_whatever_the_innings_lengths() -> None:
    recipe = CricketRecipe(config("data.matches=8"))
    net = network()
    graphs = [innings_graph(record, MEMORY) for record in LEAGUE.test]
    assert len({each["ball"].num_nodes for each in graphs}) > 1
    parts = [recipe.loss(net, collate_graphs([each])) for each in graphs]
    total, count = recipe.loss(net, collate_graphs(graphs))
    assert count == sum(number for _, number in parts) == sum(len(record.outcomes) for record in LEAGUE.test)
    torch.testing.assert_close(total, torch.stack([part for part, _ in parts]).sum())
    metrics = recipe.metrics(net, collate_graphs(graphs))
    torch.testing.assert_close(metrics["log_loss"][0].float(), total)  # type: ignore[index]


def test_ensemble_members_learn_separately_and_are_averaged() -> None:
    recipe = CricketRecipe(config("data.matches=8", "model.members=2"))
    one, two = network(), network()
    with torch.no_grad():
        two.output.weight.neg_()
    panel = CricketEnsemble([one, two])
    batch = collate_graphs([innings_graph(record, MEMORY) for record in LEAGUE.test[:2]])
    mean = (one(batch).softmax(1) + two(batch).softmax(1)) / 2
    torch.testing.assert_close(panel.eval()(batch).softmax(1), mean)
    alone = [recipe.loss(each, batch)[0] for each in (one, two)]
    panel.training = True  # its members stay as they are: no dropout
    total, count = recipe.loss(panel, batch)
    assert count == len(batch["ball"].y)
    torch.testing.assert_close(total, (alone[0] + alone[1]) / 2)
    weights = [member.identity.weight for member in recipe.model(recipe._config).members]  # type: ignore[union-attr]
    assert not torch.equal(*weights)


def test_class_weights_weigh_rare_outcomes_more_and_keep_the_mean() -> None:
    base = torch.tensor(CricketRecipe(config("data.matches=8")).league.table.base)
    for kind, power in (("none", 0.0), ("sqrt", 0.5), ("balanced", 1.0)):
        weights = CricketRecipe(config("data.matches=8", f"model.class_weights={kind}")).class_weights.double()
        assert float(weights @ base) == pytest.approx(1, rel=1e-5)
        torch.testing.assert_close(weights / weights[0], (base[0] / base) ** power, rtol=1e-4, atol=1e-4)


def test_norms_and_biases_do_not_decay() -> None:
    recipe = CricketRecipe(config("data.matches=8"))
    model = recipe.model(recipe._config)
    optimizer = build_optimizer(model, recipe._config.optim, 16)
    names = {parameter: name for name, parameter in model.named_parameters()}
    decaying = {names[p] for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert {name for name, parameter in model.named_parameters() if parameter.dim() > 1} == decaying


def test_every_innings_is_one_graph() -> None:
    graphs = InningsGraphs(LEAGUE.train, MEMORY)
    assert len(graphs) == 12
    assert [len(graphs[number]["ball"].y) for number in range(12)] == [len(each.outcomes) for each in LEAGUE.train]


def test_a_width_that_the_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.heads: expected a divisor of width=64, got 5"):
        load_recipe("cricket", ["model.heads=5"])
