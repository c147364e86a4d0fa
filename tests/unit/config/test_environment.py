"""Variables that are lent to what runs inside a block."""

import pytest

from lockstep.config.environment import exported, variable


def test_exported_variables_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TEST_KEPT", "before")
    with exported({"LOCKSTEP_TEST_KEPT": "inside", "LOCKSTEP_TEST_NEW": "inside"}):
        assert variable("LOCKSTEP_TEST_KEPT") == variable("LOCKSTEP_TEST_NEW") == "inside"
    assert variable("LOCKSTEP_TEST_KEPT") == "before"
    assert variable("LOCKSTEP_TEST_NEW") is None
