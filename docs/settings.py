"""The page of all settings, made from the schemas: key, default, what it may be, and the remark beside it."""

import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel

from lockstep.config.outline import Outline
from lockstep.config.schema import Config
from lockstep.config.search import SearchConfig


class Setting(NamedTuple):
    path: tuple[str, ...]
    default: str
    remark: str
    is_duration: bool


def settings_page() -> str:
    lines = [
        "# Settings",
        "",
        "What a config may say: in a YAML file, or as `key=value` on the command line, with the path as it stands",
        "here. Recipes have sections of their own besides, such as `model` and `data`. Made from the schemas.",
    ]
    for title, schema in (("Training", Config), ("Search", SearchConfig)):
        outline = Outline(schema)
        lines += ["", f"## {title}", "", "| setting | default | expected | |", "|---|---|---|---|"]
        for setting in _settings(schema):
            key = ".".join(setting.path)
            duration = "a duration, as in 200 steps, 2 epochs or 1e6 samples" if setting.is_duration else ""
            expected = outline.expected(setting.path) or duration
            lines.append(f"| `{key}` | {setting.default} | {expected} | {setting.remark} |")
    return "\n".join(lines) + "\n"


def _settings(schema: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[Setting]:
    remarks = _remarks(schema)
    for name, field in schema.model_fields.items():
        key = (*path, str(field.validation_alias or name))
        is_duration = "Duration" in str(field.annotation)
        yield Setting(key, _shown(field), remarks.get(name, ""), is_duration)
        section = _section(field.annotation)
        if section is not None:
            yield from _settings(section, key)


def _section(annotation: Any) -> type[BaseModel] | None:
    """The schema of a key that holds keys of its own; of a list's elements, none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    alternatives = () if get_origin(annotation) is tuple else get_args(annotation)
    return next((section for each in alternatives if (section := _section(each)) is not None), None)


def _shown(field: Any) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, BaseModel):
        return ""  # that of each of its keys
    if default is None or default in ((), {}):
        return "–"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{list(default) if isinstance(default, tuple) else default}`"


def _remarks(schema: type[BaseModel]) -> dict[str, str]:
    """Comments at the ends of the fields' lines, those of the schemas below first."""
    remarks: dict[str, str] = {}
    for each in reversed(schema.__mro__):
        if each is not BaseModel and issubclass(each, BaseModel):
            source = inspect.getsource(each)
            remarks |= dict(re.findall(r"^    (\w+): .*?  # (?!noqa)(.*)$", source, re.MULTILINE))
    return {name: remark.replace("|", "\\|").replace("*", "\\*") for name, remark in remarks.items()}
