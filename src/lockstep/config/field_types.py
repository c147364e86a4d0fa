"""Field types for config schemas: whole numbers, flags, durations, free-form sections, private text."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    GetPydanticSchema,
    PlainSerializer,
    PlainValidator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from lockstep.config import environment
from lockstep.config.argument_checks import MAX_WORKERS
from lockstep.config.duration import Duration
from lockstep.config.located_value import KeyPath
from lockstep.errors import ConfigError

PRIVATE_FORMAT = "private"  # marks a `Private` field in a JSON schema

_LARGEST = 2**63 - 1  # the largest index that a tensor can hold
_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class Frozen(BaseModel):
    """Base class of every config section: immutable, and a key that it does not declare is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_by_name=True,  # in Python; in a file a field is known by its alias only
        validate_by_alias=True,
        hide_input_in_errors=True,  # an error raised from Python must not show private text either
        ser_json_inf_nan="constants",
    )


def read_whole(value: Any) -> int:
    """Validate a whole number; accepts 1e3 as 1000."""
    if not _is_whole(value):
        raise PydanticCustomError("whole_number", "expected a whole number")
    number = int(value)
    if abs(number) > _LARGEST:
        raise PydanticCustomError("out_of_range", "expected a whole number below 2⁶³")
    return number


def _is_whole(value: Any) -> bool:
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, int) and not isinstance(value, bool)


def _read_flag(value: Any) -> Any:
    if isinstance(value, str):
        value = _FLAGS.get(value.lower(), value)
    if not isinstance(value, bool):
        raise PydanticCustomError("bool_type", "expected true or false")
    return value


def _read_power_of_two(value: Any, alternative: str = "") -> Any:
    number = read_whole(value) if _is_whole(value) else 0
    if number < 1 or number & (number - 1):
        raise PydanticCustomError("power_of_two", "expected {alternative}a power of two", {"alternative": alternative})
    return number


def _read_lanes(value: Any) -> Any:
    return value if value == "auto" else _read_power_of_two(value, "auto or ")


Whole = Annotated[int, Field(ge=0), BeforeValidator(read_whole)]
"""A whole number, 0 or greater; 1e3 is 1000."""
WorkerCount = Annotated[int, Field(ge=0, le=MAX_WORKERS), BeforeValidator(read_whole)]
"""How many processes of each rank load samples."""
PositiveInt = Annotated[int, Field(gt=0), BeforeValidator(read_whole)]
"""A whole number greater than 0; 1e3 is 1000."""
Flag = Annotated[bool, BeforeValidator(_read_flag)]
"""true or false; also yes, no, on and off, in any case. A number is not a flag."""
LaneCount = Annotated[int | Literal["auto"], BeforeValidator(_read_lanes)]
"""A power of two, or auto."""
PowerOfTwo = Annotated[int, BeforeValidator(lambda value: _read_power_of_two(value))]
"""1, 2, 4 …"""
Positive = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
"""A finite number greater than 0."""
NonNegative = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
"""A finite number, 0 or greater."""
DurationField = Annotated[Duration, PlainValidator(Duration.parse), PlainSerializer(str, return_type=str)]
"""`500 steps`, `2 epochs`, `1e6 samples`, or a whole number of steps."""


def require_time(value: Duration) -> Duration:
    """Refuse a duration of 0."""
    if not value.number:
        raise PydanticCustomError("duration", "expected a duration greater than 0, got {value}", {"value": str(value)})
    return value


def _freeze(value: Any) -> Any:
    if isinstance(value, dict):
        return ConfigSection.model_validate(value)
    if isinstance(value, list | tuple):
        return tuple(map(_freeze, value))
    return value


class ConfigSection(Frozen):
    """A free-form section: any keys, read as attributes (`config.model.encoder.width`), immutable at every level."""

    model_config = ConfigDict(extra="allow")

    __pydantic_extra__: dict[str, Annotated[Any, AfterValidator(_freeze)]]

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    @model_validator(mode="after")
    def _refuse_hidden_keys(self) -> Self:
        for name in self.model_extra or {}:
            if name in dir(ConfigSection):  # reading the key would silently return the method instead
                raise PydanticCustomError("hidden_key", "the key {name} is reserved; rename it", {"name": name})
        return self


# Any to a type checker, so that a subclass may narrow the field to its own Frozen class.
FreeForm = Annotated[Any, GetPydanticSchema(lambda _source, handler: handler(ConfigSection))]


@dataclass(frozen=True, slots=True)
class Private:
    """Text in which `${NAME}` stands for an environment variable: a token, a path on this machine.

    Only the text as written is ever shown, saved or compared; call `reveal()` where the resolved text is used.
    `$NAME` and `$$` stand for themselves.
    """

    text: str

    def __str__(self) -> str:
        return self.text

    def reveal(self) -> str:
        """The text with the variables' values; a ConfigError names a variable that is not set."""
        fault = self.fault()
        if fault:
            raise ConfigError([fault])
        return _REFERENCE.sub(lambda match: environment.variable(match[1]) or "", self.text)

    def fault(self) -> str | None:
        """Why the text cannot be revealed, worded without showing it; None if it can."""
        if "${" in _REFERENCE.sub("…", self.text):
            return "expected ${NAME} for an environment variable, with only letters, digits and underscores in NAME"
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
    """The names of the environment variables that `text` refers to, each once, in order of first mention."""
    return list(dict.fromkeys(_REFERENCE.findall(text)))


def private_values(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Private]]:
    """Every `Private` inside a validated config, with its path, defaults included."""
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
