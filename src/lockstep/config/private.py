"""Values that may refer to the environment, and never appear resolved in anything that is shown or written."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from lockstep.config import environment
from lockstep.config.value import KeyPath
from lockstep.errors import ConfigError

PRIVATE_FORMAT = "private"  # marks such a field in a schema's outline

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True, slots=True)
class Private:
    """Text in which `${NAME}` stands for an environment variable: a token, a path on this machine.

    Only the text as written is ever shown, dumped or compared; `reveal()` resolves it at the moment of use.
    `$NAME` and `$$` stand for themselves.
    """

    text: str

    def __str__(self) -> str:
        return self.text

    def reveal(self) -> str:
        fault = self.fault()
        if fault:
            raise ConfigError([fault])
        return _REFERENCE.sub(lambda match: environment.variable(match[1]) or "", self.text)

    def fault(self) -> str | None:
        """What keeps this from being revealed, in words that do not show the text."""
        if "${" in _REFERENCE.sub("…", self.text):
            return "a reference to the environment is written ${NAME}, NAME of letters, digits and underscores"
        unset = [name for name in references(self.text) if environment.variable(name) is None]
        if not unset:
            return None
        if len(unset) == 1:
            return f"environment variable {unset[0]} is not set"
        return f"environment variables {', '.join(unset)} are not set"

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._validate, serialization=core_schema.to_string_ser_schema()
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "string", "format": PRIVATE_FORMAT}

    @classmethod
    def _validate(cls, value: Any) -> "Private":
        if isinstance(value, str):
            value = cls(value)
        if not isinstance(value, cls):
            raise PydanticCustomError("string_type", "expected text")
        fault = value.fault()
        if fault:
            raise PydanticCustomError("private", "{fault}", {"fault": fault})
        return value


def references(text: str) -> list[str]:
    """The names of the variables that `text` refers to, each once, in the order of their first mention."""
    return list(dict.fromkeys(_REFERENCE.findall(text)))


def private_values(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Private]]:
    """Every private value inside a validated one, with its path, defaults included."""
    if isinstance(value, Private):
        yield path, value
    elif isinstance(value, BaseModel):
        for name, item in value:
            yield from private_values(item, (*path, name))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from private_values(item, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from private_values(item, (*path, index))
