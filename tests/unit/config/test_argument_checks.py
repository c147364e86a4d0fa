"""Arguments of scripts: what each check refuses, in one line with the name and the value."""

from collections.abc import Callable
from typing import Any

import pytest

from lockstep.config.argument_checks import (
    require_count,
    require_flag,
    require_fraction,
    require_known,
    require_positive,
    require_whole,
)
from lockstep.errors import UserError


@pytest.mark.parametrize(
    ("check", "valid", "invalid", "expected"),
    [
        (require_count, [1, 10**9], [0, -1, 1.0, True, "1", None], "a whole number greater than 0"),
        (require_whole, [0, 1], [-1, 0.0, False, "0", None], "a whole number of at least 0"),
        (require_positive, [1, 0.5, float("inf")], [0, -0.5, float("nan"), True, "1", None], "a number greater than 0"),
        (require_fraction, [0, 0.5, 1], [-0.1, 1.1, float("nan"), True, "1", None], "a number from 0 to 1"),
        (require_flag, [True, False], [0, 1, "true", None], "True or False"),
    ],
)
def test_a_check_refuses_with_name_and_value(
    check: Callable[[str, Any], None], valid: list[Any], invalid: list[Any], expected: str
) -> None:
    for value in valid:
        check("size", value)
    for value in invalid:
        with pytest.raises(UserError) as caught:
            check("size", value)
        assert str(caught.value) == f"size={value!r}: expected {expected}"


def test_an_alternative_ends_the_message() -> None:
    with pytest.raises(UserError, match=r"^clip_norm=0: expected a number greater than 0, or None$"):
        require_positive("clip_norm", 0, otherwise=", or None")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["wrapp"], "fsdp has no option wrapp; did you mean wrap?"),
        (["wrap", "zzz"], "fsdp has no option zzz: expected wrap, cpu_offload"),
    ],
)
def test_an_unknown_name_gets_a_suggestion_or_the_list(given: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        require_known("fsdp has no option", given, ("wrap", "cpu_offload"))
    assert str(caught.value) == message
