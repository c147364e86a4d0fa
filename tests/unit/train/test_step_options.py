"""The options of a step: defaults, and what is refused."""

import pytest

from lockstep.errors import UserError
from lockstep.train.run import Run
from lockstep.train.step_options import StepOptions
from lockstep.train.strategies.fsdp_units import FsdpOptions
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
        ({"clip_norm": "1"}, "clip_norm='1': expected a number greater than 0"),
        ({"bucket_mb": "4"}, "bucket_mb='4': expected a number greater than 0"),
        ({"activation_checkpointing": True}, "activation_checkpointing=True: expected a dictionary"),
        ({"activation_checkpointing": []}, "activation_checkpointing=[]: expected a dictionary"),
        ({"activation_checkpointing": {"every": "2"}}, "activation checkpointing: every='2': expected a whole number"),
        ({"activation_checkpointing": {"every": 1.5}}, "activation checkpointing: every=1.5: expected a whole number"),
        ({"activation_checkpointing": {"every": 0}}, "activation checkpointing: every=0: expected a whole number"),
        ({"activation_checkpointing": {"every": True}}, "activation checkpointing: every=True: expected a whole"),
        ({"activation_checkpointing": {"classes": 3}}, "activation checkpointing: classes=3: expected a list of names"),
        ({"activation_checkpointing": {"classes": [3]}}, "activation checkpointing: classes=[3]: expected a list of"),
        ({"parallel": 5}, "parallel=5: expected a name, or the sizes of a mesh"),
        ({"parallel": None}, "parallel=None: expected a name, or the sizes of a mesh"),
        ({"parallel": {"data": "2"}, "determinism": "fast"}, "parallel.data='2': expected a whole number"),
        ({"fsdp": {"wrap": 3}}, "fsdp: wrap=3: expected names of classes"),
        ({"fsdp": {"wrap": [3]}}, "fsdp: wrap=[3]: expected names of classes"),
        ({"fsdp": {"min_parameters": "x"}}, "fsdp: min_parameters='x': expected a number greater than 0"),
        ({"fsdp": {"min_parameters": 0}}, "fsdp: min_parameters=0: expected a number greater than 0"),
        ({"fsdp": {"cpu_offload": "no"}}, "fsdp: cpu_offload='no': expected True or False"),
        ({"tensor_plan": []}, "tensor_plan=[]: expected a style for each module name pattern"),
        ({"tensor_plan": {"*.query": ["row"]}}, "tensor_plan={'*.query': ['row']}: expected a style for each"),
    ],
)
def test_unknown_options_are_one_line(given: dict[str, object], problem: str) -> None:
    with pytest.raises(UserError) as caught:
        Run(None, World(), **given)
    assert str(caught.value).startswith(problem)
    assert "\n" not in str(caught.value)


def test_one_class_to_wrap_may_be_given_by_itself() -> None:
    assert FsdpOptions.read({"wrap": "Block"}) == FsdpOptions.read({"wrap": ["Block"]}) == FsdpOptions(wrap=("Block",))
