"""The torch versions that lockstep is tested with, and what to say about any other."""

TESTED_TORCH_VERSIONS = ("2.11", "2.13")  # including its private names: tests/contracts/test_private_names_*.py
TESTED_TORCH = f"torch {' or '.join(TESTED_TORCH_VERSIONS)}"  # for messages


def describe_untested_torch(version: str) -> str | None:
    """One line about a torch version that is not tested; None if it is."""
    if ".".join(version.split(".")[:2]) in TESTED_TORCH_VERSIONS:
        return None
    return f"torch {version} is not tested with this version of lockstep: use {TESTED_TORCH} for guaranteed results"
