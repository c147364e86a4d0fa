"""A setting of models with attention: heads that share a width evenly. It stands after `width` in its section."""

from typing import Annotated

from pydantic import AfterValidator, ValidationInfo
from pydantic_core import PydanticCustomError

from lockstep.config.fields import Count


def _share_the_width(value: int, info: ValidationInfo) -> int:
    width = info.data.get("width", value)
    if width % value:
        raise PydanticCustomError(
            "heads", "{heads} heads cannot share width={width} evenly", {"heads": value, "width": width}
        )
    return value


Heads = Annotated[Count, AfterValidator(_share_the_width)]
