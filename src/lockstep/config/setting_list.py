"""All settings of a config class: key, default, what is expected, and the description beside it in the source."""

import ast
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from lockstep.config.config_errors import SchemaOutline
from lockstep.config.located_value import Plain, show_value

_DIRECTIVES = ("noqa", "fmt:", "type:")  # comments for tools
_DURATION = "a duration, as in 200 steps, 2 epochs or 1e6 samples"


@dataclass(frozen=True)
class Setting:
    """One setting.

    Args:
        key: its dotted key, as on the command line.
        default: its value if it is omitted; of a section, an empty mapping, or None if it is not there by default.
        expected: which values are valid, in words; empty where the schema does not say.
        description: what it does; empty if its name says it.
        is_required: without it, a config is incomplete.
        is_section: it holds other settings, which follow it in the list.
    """

    key: str
    default: Plain
    expected: str
    description: str
    is_required: bool = False
    is_section: bool = False

    @property
    def shown_default(self) -> str:
        """The default as YAML spells it; `–` if there is none."""
        if self.default is None:
            return "required" if self.is_required else "–"
        if self.default in ([], {}):
            return "" if self.is_section else "–"
        return self.default if isinstance(self.default, str) else show_value(self.default)


def list_settings(schema: type[BaseModel], config: BaseModel | None = None) -> list[Setting]:
    """Return the settings of a config class and of its sections, in the order of their definition.

    Args:
        schema: the class.
        config: a config of this class, whose values then stand in place of the defaults.
    """
    return list(_settings(schema, config, SchemaOutline(schema), ()))


def _settings(
    schema: type[BaseModel], config: BaseModel | None, outline: SchemaOutline, path: tuple[str, ...]
) -> Iterator[Setting]:
    descriptions = _descriptions(schema)
    for name, field in schema.model_fields.items():
        key = (*path, str(field.validation_alias or name))
        section = _section(field.annotation)
        expected = outline.expected(key) or (_DURATION if "Duration" in str(field.annotation) else "")
        value = None if field.is_required() else field.get_default(call_default_factory=True)
        if config is not None:
            value = getattr(config, name)
        yield Setting(
            ".".join(key),
            _plain(value),
            expected,
            descriptions.get(name, ""),
            is_required=field.is_required(),
            is_section=section is not None,
        )
        if section is not None:
            yield from _settings(section, value if isinstance(value, section) else None, outline, key)


def _section(annotation: Any) -> type[BaseModel] | None:
    """Return the schema of a section; None for a plain key, and for a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    alternatives = () if get_origin(annotation) is tuple else get_args(annotation)
    return next((section for each in alternatives if (section := _section(each)) is not None), None)


def _plain(value: Any) -> Plain:
    """Return a value as YAML can spell it. The settings of a section are listed by themselves."""
    if isinstance(value, BaseModel):
        return {name: _plain(item) for name, item in (value.model_extra or {}).items()}  # of a free-form section
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _descriptions(schema: type[BaseModel]) -> dict[str, str]:
    """Return the comments at the ends of the fields' definitions, including inherited fields."""
    descriptions: dict[str, str] = {}
    for each in reversed(schema.__mro__):
        if each is not BaseModel and issubclass(each, BaseModel):
            descriptions |= _comments_of_fields(each)
    return descriptions


def _comments_of_fields(schema: type[BaseModel]) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(schema))
    except (OSError, TypeError):  # made without a file, as in a notebook's cell that was run again
        return {}
    comments = {
        token.start[0]: text
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
        and not (text := token.string.removeprefix("#").strip()).startswith(_DIRECTIVES)
    }
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if comment := next((comments[line] for line in reversed(lines) if line in comments), None):
                found[node.target.id] = comment
    return found
