"""What can be chosen about a step, and what is refused."""

import pytest

from lockstep.errors import UserError
from lockstep.train.options import StepOptions
from lockstep.train.run import Run
from lockstep.world.world import World


def test_the_defaults() -> None:
    options = StepOptions()
    assert (options.precision, options.determinism, options.on_nonfinite) == ("fp32", "lockstep", "stop")
    assert "bucket_mb" not in options.numerics()
    assert options.numerics()["precision"] == "fp32"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"precision": "int8"}, "precision='int8': expected fp32, bf16 or fp16"),
        ({"on_nonfinite": "cry"}, "on_nonfinite='cry': expected stop, skip or ignore"),
        ({"determinism": "maybe"}, "determinism='maybe': expected lockstep or fast"),
        ({"clip_norm": 0.0}, "clip_norm=0.0: expected a number greater than 0"),
        ({"clip_norm": float("nan")}, "clip_norm=nan: expected a number greater than 0"),
        ({"clip_nrom": 1.0}, "Run has no option clip_nrom; did you mean clip_norm?"),
        ({"zzz": 1}, "Run has no option zzz"),
    ],
)
def test_what_there_is_not_is_one_line(given: dict[str, object], problem: str) -> None:
    with pytest.raises(UserError, match="^" + problem.replace("?", r"\?")):
        Run(None, World(), **given)
