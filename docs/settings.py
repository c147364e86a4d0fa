"""The page of all settings, generated from the schemas: key, default, expected values and description."""

import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel

from lockstep.config.config_errors import SchemaOutline
from lockstep.config.search_schema import SearchConfig
from lockstep.config.train_schema import Config


class Setting(NamedTuple):
    path: tuple[str, ...]
    default: str
    description: str
    is_duration: bool


def settings_page() -> str:
    """Return the page as Markdown."""
    lines = [
        "# Settings",
        "",
        "All keys of a config. Set them in a YAML file, or as `key=value` on the command line, with the dotted names",
        "below. Recipes add more keys, in sections such as `model` and `data`. Generated from the schemas.",
    ]
    for title, schema in (("Training", Config), ("Search", SearchConfig)):
        outline = SchemaOutline(schema)
        lines += ["", f"## {title}", "", "| setting | default | expected | description |", "|---|---|---|---|"]
        for setting in _settings(schema):
            key = ".".join(setting.path)
            duration = "a duration, as in 200 steps, 2 epochs or 1e6 samples" if setting.is_duration else ""
            expected = outline.expected(setting.path) or duration
            lines.append(f"| `{key}` | {setting.default} | {expected} | {setting.description} |")
    return "\n".join(lines) + "\n"


def _settings(schema: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[Setting]:
    descriptions = _descriptions(schema)
    for name, field in schema.model_fields.items():
        key = (*path, str(field.validation_alias or name))
        is_duration = "Duration" in str(field.annotation)
        yield Setting(key, _shown(field), descriptions.get(name, ""), is_duration)
        section = _section(field.annotation)
        if section is not None:
            yield from _settings(section, key)


def _section(annotation: Any) -> type[BaseModel] | None:
    """Return the schema of a section; None for a plain key, and for a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    alternatives = () if get_origin(annotation) is tuple else get_args(annotation)
    return next((section for each in alternatives if (section := _section(each)) is not None), None)


def _shown(field: Any) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, BaseModel):
        return ""  # its keys have their own
    if default is None or default in ((), {}):
        return "–"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{list(default) if isinstance(default, tuple) else default}`"


def _descriptions(schema: type[BaseModel]) -> dict[str, str]:
    """Return the comments at the ends of the fields' lines, including inherited fields."""
    descriptions: dict[str, str] = {}
    for each in reversed(schema.__mro__):
        if each is not BaseModel and issubclass(each, BaseModel):
            source = inspect.getsource(each)
            descriptions |= dict(re.findall(r"^    (\w+): .*?  # (?!noqa)(.*)$", source, re.MULTILINE))
    return {name: description.replace("|", "\\|").replace("*", "\\*") for name, description in descriptions.items()}
