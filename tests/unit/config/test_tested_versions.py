"""An untested torch is named in one line; a tested one is not."""

import pytest
import torch

from lockstep.config.tested_versions import describe_untested_torch


def test_the_installed_torch_is_tested() -> None:
    assert describe_untested_torch(torch.__version__) is None


@pytest.mark.parametrize("version", ["2.12.0", "2.14.0a0+git", "3.0"])
def test_another_one_is_named(version: str) -> None:
    line = describe_untested_torch(version)
    assert line is not None
    assert line.startswith(f"torch {version} is not tested with this version of lockstep: use torch 2.11 or 2.13 ")
    assert "\n" not in line
