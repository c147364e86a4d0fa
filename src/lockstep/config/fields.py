"""The field types that schemas are written with."""

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    PlainSerializer,
    PlainValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from lockstep.config.duration import Duration

_LARGEST = 2**63 - 1  # what a tensor of indices can hold
_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class Frozen(BaseModel):
    """A part of a config: it cannot be changed, and a key that it does not have is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_by_name=True,  # in Python; a file knows a field by its alias only
        validate_by_alias=True,
        hide_input_in_errors=True,  # an error raised from Python must not show private text either
        ser_json_inf_nan="constants",
    )


def read_whole(value: Any) -> Any:
    """Lets 1e3 through as 1000, and nothing else that is not a whole number already."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise PydanticCustomError("whole_number", "expected a whole number")
    if abs(value) > _LARGEST:
        raise PydanticCustomError("out_of_range", "expected a whole number below 2⁶³")
    return value


def _read_flag(value: Any) -> Any:
    if isinstance(value, str):
        value = _FLAGS.get(value.lower(), value)
    if not isinstance(value, bool):
        raise PydanticCustomError("bool_type", "expected true or false")
    return value


def _read_power_of_two(value: Any, or_else: str = "") -> Any:
    number = read_whole(value)
    if number < 1 or number & (number - 1):
        raise PydanticCustomError("power_of_two", "expected {or_else}a power of two", {"or_else": or_else})
    return number


def _read_lanes(value: Any) -> Any:
    return value if value == "auto" else _read_power_of_two(value, "auto or ")


Whole = Annotated[int, Field(ge=0), BeforeValidator(read_whole)]
"""A whole number, 0 or greater; 1e3 is 1000."""
Count = Annotated[int, Field(gt=0), BeforeValidator(read_whole)]
"""A whole number greater than 0; 1e3 is 1000."""
Flag = Annotated[bool, BeforeValidator(_read_flag)]
"""true or false; also yes, no, on, off, in any case. Numbers are not flags."""
Lanes = Annotated[int | Literal["auto"], BeforeValidator(_read_lanes)]
"""A power of two, or auto."""
PowerOfTwo = Annotated[int, BeforeValidator(lambda value: _read_power_of_two(value))]
"""1, 2, 4 …"""
Positive = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
"""A finite number greater than 0."""
NonNegative = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
"""A finite number, 0 or greater."""
DurationField = Annotated[Duration, PlainValidator(Duration.parse), PlainSerializer(str, return_type=str)]
"""`500 steps`, `2 epochs`, `1e6 samples`, or a whole number of steps."""


def _freeze(value: Any) -> Any:
    if isinstance(value, dict):
        return Section.model_validate(value)
    if isinstance(value, list | tuple):
        return tuple(map(_freeze, value))
    return value


class Section(Frozen):
    """A free-form part of a config: any keys, read as attributes (`config.model.encoder.width`), frozen all the way."""

    model_config = ConfigDict(extra="allow")

    __pydantic_extra__: dict[str, Annotated[Any, AfterValidator(_freeze)]]

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    @model_validator(mode="after")
    def _refuse_hidden_keys(self) -> Self:
        for name in self.model_extra or {}:
            if name in dir(Section):  # the attribute would be found first, and silently
                raise PydanticCustomError("hidden_key", "the key {name} is taken; choose another", {"name": name})
        return self


# Any to a type checker, so that a subclass may narrow the field to a Frozen class of its own.
FreeForm = Annotated[Any, GetPydanticSchema(lambda _source, handler: handler(Section))]


def require_time(value: Duration) -> Duration:
    if not value.number:
        raise PydanticCustomError("duration", "expected a duration greater than 0, got {value}", {"value": str(value)})
    return value
