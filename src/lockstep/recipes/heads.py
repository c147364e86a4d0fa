"""A config field for the number of attention heads, which must divide the `width` declared before it."""

from typing import Annotated

from pydantic import AfterValidator, ValidationInfo
from pydantic_core import PydanticCustomError

from lockstep.config.field_types import PositiveInt


def _divides_width(value: int, info: ValidationInfo) -> int:
    width = info.data.get("width", value)
    if width % value:
        raise PydanticCustomError(
            "heads", "expected a divisor of width={width}, got {heads}", {"heads": value, "width": width}
        )
    return value


Heads = Annotated[PositiveInt, AfterValidator(_divides_width)]
