"""Finding recipes and their configs by name."""

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
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


def test_a_wrong_argument_of_an_optimizer_is_named_with_its_place() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("digits", ["optim.name=RMSprop", "optim.arguments.alhpa=0.9"])
    assert caught.value.problems == (
        "command line: optim.arguments.alhpa: RMSprop has no argument alhpa; did you mean alpha?",
    )
    assert load_config("digits", ["optim.name=RMSprop", "optim.arguments.alpha=0.9"])


def test_only_an_override_may_not_be_for_another_optimizer(tmp_path: Path) -> None:
    left_over = tmp_path / "mine.yaml"
    left_over.write_text("base: digits\noptim: {name: adam, momentum: 0.5}\n")
    assert load_config(str(left_over), ["optim.betas=[0.8, 0.9]"]).optim.momentum == 0.5  # type: ignore[attr-defined]
    assert load_config(str(left_over), ["optim.name=sgd", "optim.momentum=0.4"])
    with pytest.raises(ConfigError, match=r"^command line: optim.eps: only for adam and adamw, and optim.name is sgd$"):
        load_config(str(left_over), ["optim.name=sgd", "optim.eps=1e-6"])
