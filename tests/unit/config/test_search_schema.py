"""The search config: the same defaults as in a script, and one line for each mistake."""

from dataclasses import asdict
from pathlib import Path

import pytest

from lockstep.config.search_schema import SearchConfig
from lockstep.errors import ConfigError
from lockstep.search.evolution import EvolutionSettings
from lockstep.search.search_job import build_search_settings
from lockstep.search.search_loop import SearchSettings
from lockstep.search.surrogate_network import NetworkSettings


def test_the_defaults_are_those_of_a_script() -> None:
    config = SearchConfig()
    assert build_search_settings(config) == SearchSettings()
    assert config.evolution.model_dump().keys() == asdict(EvolutionSettings()).keys() - {"population_size"}
    assert config.network is not None
    assert config.network.model_dump().keys() == asdict(NetworkSettings()).keys()


def test_every_key_reaches_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "run.json"  # JSON is YAML
    path.write_text(
        '{"max_generations": 7, "population_size": 5, "save_frequency": 2, "max_runtime_hours": 0.5, '
        '"early_stopping": {"patience": 4, "min_delta": 0.25}, "evolution": {"tournament_size": 3}, '
        '"network": {"train_every": 2, "curriculum": [{"generation": 3, "policy": 0.0, "guided_share": 1.0}]}}'
    )
    settings = build_search_settings(SearchConfig.from_file(path, ["network.steps=9"]))
    assert (settings.max_generations, settings.population_size, settings.save_frequency) == (7, 5, 2)
    assert (settings.max_runtime_s, settings.patience, settings.min_delta) == (1800.0, 4, 0.25)
    assert settings.evolution.tournament_size == 3
    assert settings.network is not None
    assert (settings.network.train_every, settings.network.steps) == (2, 9)
    assert settings.network.stage(2).policy == 1.0
    assert settings.network.stage(3).policy == 0.0
    assert settings.network.num_guided(10, 3) == 10


def test_a_quick_search_is_small() -> None:
    settings = build_search_settings(SearchConfig(quick=True))
    assert (settings.max_generations, settings.population_size) == (3, 16)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("max_generation=3", "max_generation: unknown key; did you mean max_generations?"),
        ("population_size=0", "population_size: expected a whole number greater than 0, got 0"),
        ("evolution.crossover_rate=1.5", "evolution.crossover_rate: "),
        ("evolution.mutation_strength=0.0", "evolution.mutation_strength: expected a number greater than 0"),
        ("evolution.strength_floor=0.5", "evolution.strength_floor: expected at most mutation_strength (0.1), got 0.5"),
        ("network.memory=7", "network.memory: expected a whole number of at least 8, got 7"),
        ("network.candidates=1", "network.candidates: expected a whole number of at least 2, got 1"),
        ("early_stopping={min_delta: 1.0}", "early_stopping.target: give patience, target, or both"),
        ("network.lanes=3", "network.lanes: expected a power of two, got 3"),
        ("network.global_batch=13", "network.global_batch: expected a multiple of lanes (4), got 13"),
        (
            "network.curriculum=[{generation: 4}, {generation: 4}]",
            "network.curriculum: expected each stage to start after the previous one, got generations 4, 4",
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, override: str, expected: str) -> None:
    (tmp_path / "run.yaml").write_text("seed: 1\n")
    with pytest.raises(ConfigError) as raised:
        SearchConfig.from_file(tmp_path / "run.yaml", [override])
    (problem,) = raised.value.problems
    assert expected in problem
