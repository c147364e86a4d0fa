"""A field type for attention heads, which must divide the `width` declared before it in the same section."""

from typing import Annotated

from pydantic import AfterValidator, ValidationInfo
from pydantic_core import PydanticCustomError

from lockstep.config.field_types import Count


def _divides_width(value: int, info: ValidationInfo) -> int:
    width = info.data.get("width", value)
    if width % value:
        raise PydanticCustomError(
            "heads", "{heads} heads cannot share width={width} evenly", {"heads": value, "width": width}
        )
    return value


Heads = Annotated[Count, AfterValidator(_divides_width)]
