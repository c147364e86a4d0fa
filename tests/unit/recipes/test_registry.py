"""Finding recipes and their configs by name."""

import subprocess
import sys

import pytest

from lockstep.recipes.registry import builtin_names, load_config, load_recipe


@pytest.mark.parametrize("name", builtin_names())
def test_the_config_of_a_builtin_recipe_is_the_same_with_and_without_the_recipe(name: str) -> None:
    recipe, config = load_recipe(name, ["seed=3"])
    assert load_config(name, ["seed=3"]) == config
    assert type(config) is recipe.config_class


def test_checking_the_config_of_a_builtin_recipe_imports_no_torch() -> None:
    """`lockstep train -n` does this before the fork server starts, which imports torch side by side with the agent."""
    code = f"""
import sys
from lockstep.loggers.logger_factory import check_extras
from lockstep.recipes.registry import load_config
for name in {builtin_names()}:
    check_extras(load_config(name).log)
print(*{{"torch", "numpy", "sklearn"}} & set(sys.modules))
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (finished.stdout.strip(), finished.stderr) == ("", "")
