"""`lockstep settings`: list the settings of a config, with their defaults and what they do."""

import json
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.command_line.config_arguments import complete_config, complete_key
from lockstep.errors import UserError
from lockstep.terminal_text import print_line

if TYPE_CHECKING:  # importing pydantic takes a while
    from lockstep.config.setting_list import Setting

_WIDTH = 110  # characters, if the output is not a terminal
_MAX_WIDTH = 140
_INDENT = "    "
_TRAINING, _SEARCH = "training", "search"


def settings(
    prefix: Annotated[
        str,
        typer.Argument(
            metavar="PREFIX",
            help="Only settings whose keys begin with this, as in optim.",
            show_default=False,
            autocompletion=complete_key,
        ),
    ] = "",
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            metavar="CONFIG",
            help="A built-in recipe or a YAML file: its settings, with its values.",
            autocompletion=complete_config,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the settings of a config: key, default, which values are valid, and what it does.

    \b
    lockstep settings optim
    lockstep settings model --recipe gpt

    Set them in a YAML file, or as key=value on the command line of `lockstep train`.
    """
    jobs = _settings_by_job(recipe)
    shown = {job: [each for each in every if each.key.startswith(prefix)] for job, every in jobs.items()}
    if not any(shown.values()):
        keys = [each.key for every in jobs.values() for each in every]
        near = get_close_matches(prefix, keys, n=1)
        raise UserError(f"no setting begins with {prefix!r}" + (f"; did you mean {near[0]}?" if near else ""))
    if as_json:
        rows = [{**asdict(each), "job": job} for job, every in shown.items() for each in every]
        print(json.dumps(rows, indent=1))
        return
    width = min(shutil.get_terminal_size((_WIDTH, 0)).columns, _MAX_WIDTH)
    parts = ["\n".join(_lines(every, width)) for every in shown.values() if every]
    titles = ["Training, and what a search has too:", "Search only:"] if len(parts) > 1 else [""]
    print_line("\n\n".join(f"{title}\n\n{part}".strip() for title, part in zip(titles, parts, strict=True)))


def _lines(settings: "Sequence[Setting]", width: int) -> Iterator[str]:
    """Yield each setting with its default on one line, and what is known about it on the next ones, indented."""
    column = max(len(each.key) for each in settings) + 2
    for each in settings:
        yield f"{each.key:{column}}{each.shown_default}".rstrip()
        about = ": ".join(part for part in ("" if each.is_section else each.expected, each.description) if part)
        yield from textwrap.wrap(about, width, initial_indent=_INDENT, subsequent_indent=_INDENT)


def _settings_by_job(recipe: str | None) -> "dict[str, list[Setting]]":
    """Return the settings of a recipe; without one, those of any training, and those that only a search has."""
    from lockstep.config.search_schema import SearchConfig
    from lockstep.config.setting_list import list_settings
    from lockstep.config.train_schema import Config
    from lockstep.recipes.registry import load_config

    if recipe is not None:
        config = load_config(recipe)
        return {_SEARCH if isinstance(config, SearchConfig) else _TRAINING: list_settings(type(config), config)}
    training = list_settings(Config)
    return {_TRAINING: training, _SEARCH: [each for each in list_settings(SearchConfig) if each not in training]}
