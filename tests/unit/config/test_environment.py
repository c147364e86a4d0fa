"""Variables that are set inside a block only."""

import pytest

from lockstep.config.environment import temporary_variables, variable


def test_temporary_variables_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TEST_KEPT", "before")
    with temporary_variables({"LOCKSTEP_TEST_KEPT": "inside", "LOCKSTEP_TEST_NEW": "inside"}):
        assert variable("LOCKSTEP_TEST_KEPT") == variable("LOCKSTEP_TEST_NEW") == "inside"
    assert variable("LOCKSTEP_TEST_KEPT") == "before"
    assert variable("LOCKSTEP_TEST_NEW") is None
