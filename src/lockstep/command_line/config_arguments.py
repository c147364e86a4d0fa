"""The arguments CONFIG and `key=value` of the commands, and what the shell offers for them when Tab is pressed.

Completion imports neither torch nor code that a config names, so that it is quick, and safe in any folder.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from lockstep.errors import ConfigError

if TYPE_CHECKING:  # importing pydantic takes a while
    from lockstep.config.job_schema import JobConfig

_CONFIGS = (".yaml", ".yml")
_FLAG = "true or false"


def complete_config(incomplete: str) -> Iterator[str]:
    """Offer the built-in recipes, YAML files and folders."""
    return _recipes_and_files(incomplete, _CONFIGS)


def complete_config_or_script(incomplete: str) -> Iterator[str]:
    """Offer the built-in recipes, YAML files, Python scripts and folders."""
    return _recipes_and_files(incomplete, (*_CONFIGS, ".py"))


def _recipes_and_files(incomplete: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    from lockstep.recipes.registry import builtin_names

    yield from (name for name in builtin_names() if name.startswith(incomplete))
    folder, _, start = incomplete.rpartition("/")
    given = f"{folder}/" if "/" in incomplete else ""
    try:
        entries = sorted(Path(given or ".").iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(start) and (start or not entry.name.startswith(".")):
            if entry.suffix in suffixes:
                yield f"{given}{entry.name}"
            elif entry.is_dir():
                yield f"{given}{entry.name}/"


def complete_setting(ctx: typer.Context, incomplete: str) -> Iterator[Any]:
    """Offer the keys of the config's settings; after a key and `=`, the values that it may have, if they are few."""
    schema = _schema(ctx)
    if (key := _key_before(ctx, incomplete)) is not None:
        return (each for each in _values(schema, key) if each.startswith(incomplete))
    key, equals, value = incomplete.partition("=")
    if equals:
        return (f"{key}={each}" for each in _values(schema, key) if each.startswith(value))
    return ((each if each.endswith(".") else f"{each}=", about) for each, about in _keys(schema, incomplete))


def complete_key(ctx: typer.Context, incomplete: str) -> Iterator[Any]:
    """Offer the keys of the config's settings."""
    return _keys(_schema(ctx), incomplete)


class TakesSettings(TyperCommand):
    """A command with CONFIG and `key=value`, which explains an unknown option that is the name of a setting."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # the class of click's NoSuchOption depends on the version of typer
            if isinstance(option := getattr(error, "option_name", None), str):
                _explain_option(error, option)
            raise


def _explain_option(error: Any, option: str) -> None:
    """Add to the message of an unknown option which setting it may stand for."""
    from lockstep.config.setting_list import list_settings
    from lockstep.config.train_schema import Config

    name = option.lstrip("-").replace("-", "_")
    keys = [setting.key for setting in list_settings(Config) if not setting.is_section]
    found = [key for key in keys if key == name] or [key for key in keys if key.rpartition(".")[2] == name]
    if found:
        error.message += f" (a setting is written {found[0]}=…, without dashes)"


ConfigArgument = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG", help="A YAML file or the name of a built-in recipe.", autocompletion=complete_config
    ),
]
SettingArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="key=value", help="Settings by dotted path: optim.lr=1e-3", autocompletion=complete_setting),
]


def _key_before(ctx: typer.Context, incomplete: str) -> str | None:
    """Return the key whose value is being typed, in bash, which takes `key=value` for three words; else None."""
    earlier = list(ctx.params.get("overrides") or ctx.params.get("arguments") or [])
    if earlier[-1:] == ["="]:
        return str(earlier[-2]) if len(earlier) > 1 else None
    is_at_equals = not incomplete and earlier and "=" not in earlier[-1] and earlier[-2:-1] != ["="]
    return str(earlier[-1]) if is_at_equals else None  # typer does not pass on the "=" itself


def _schema(ctx: typer.Context) -> "type[JobConfig]":
    from lockstep.config.train_schema import Config
    from lockstep.recipes.registry import builtin_config_class

    given = next((ctx.params[name] for name in ("config", "source", "target", "recipe") if ctx.params.get(name)), None)
    try:
        return Config if given is None else builtin_config_class(given)
    except ConfigError:  # it is told when the command runs
        return Config


def _keys(schema: "type[JobConfig]", start: str) -> Iterator[tuple[str, str]]:
    """Yield the keys that begin with `start`, and what they are for; of nothing, the outermost ones."""
    from lockstep.config.setting_list import list_settings

    for setting in list_settings(schema):
        if not start and "." not in setting.key:
            yield setting.key + "." * setting.is_section, setting.description
        elif start and setting.key.startswith(start) and not setting.is_section:
            yield setting.key, setting.description


def _values(schema: "type[JobConfig]", key: str) -> list[str]:
    from lockstep.config.config_errors import SchemaOutline

    outline, path = SchemaOutline(schema), tuple(key.split("."))
    return ["true", "false"] if outline.expected(path) == _FLAG else outline.choices(path)
